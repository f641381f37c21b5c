//! `cargo lab bench`: what hvprobe costs, beside its references in the same rig.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::cargo::{self, Workspace};
use crate::choose::choose;
use crate::instructions;
use crate::job::{Job, Stdio, Step};
use crate::packages;
use crate::process;
use crate::rig::Kind;
use crate::run::{self, MachineOptions};
use crate::setup::Ready;

/// What to measure, and where.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// What to measure
    #[arg(value_enum, default_value = "boot")]
    what: What,
    /// The machine to run on [default: direct if its KVM can run Linux guests, else tcg]
    #[arg(long, value_enum)]
    rig: Option<Kind>,
    /// boot: how often each is measured; the table shows medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// hits: calls in each loop
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..))]
    calls: u32,
    /// hits: how often every loop is timed; the shortest times and the middle ones count
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// hits: rounds of the comparison of a program with and without a probe on its path; 0 leaves it
    /// out
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// hits: hits of gdb's breakpoint; 0 leaves that out, which takes minutes in an emulated machine
    #[arg(long, default_value_t = 200)]
    gdb_hits: u32,
    /// events: how long each rate is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Measure a development build, which is made sooner and is slower
    #[arg(long)]
    dev: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

/// The measurements there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The stock kernel boots under hvprobe and under QEMU (microvm, q35): time from the start of
    /// the process to the first guest instruction and to /init, memory beyond the guest's RAM
    Boot,
    /// What one hit costs, by mechanism, beside the guest's own kprobe and kretprobe events and a
    /// breakpoint of gdb's: time, exits, ioctls, and the engine's instructions (counted on this
    /// machine with valgrind); how much slower a probe makes a program of system calls. On bochs,
    /// where instructions are counted and not time, `--calls 1000 --rounds 3 --gdb-hits 0` are enough
    Hits,
    /// How long it takes to plant 10,000 probes at once in the text of the stock kernel, and for how
    /// much of that the guest stands still. On this machine, without a guest
    Batch,
    /// How many events a second reach a gRPC client, and at what cost of CPU time and memory. On
    /// this machine, with made-up events and without a guest
    Events,
}

/// Debian's QEMU: its program, its firmware, and the module it emulates processors with.
const QEMU: &str = "qemu-system-x86_64";
const QEMU_FILES: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so",
    "/usr/share/qemu/bios-microvm.bin",
    "/usr/share/qemu/qboot.rom",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/share/seabios/bios-256k.bin",
];

/// Probes of the batch.
const BATCH: u32 = 10_000;

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    match options.what {
        What::Boot => {
            let arguments = ["--runs".to_owned(), options.runs.to_string()];
            bench(options, &workspace, "boot-bench", true, |_| {
                Ok(arguments.into())
            })
        }
        What::Hits => {
            let arguments = |rig| hits(options, &workspace, rig);
            bench(
                options,
                &workspace,
                "hits-bench",
                options.gdb_hits > 0,
                arguments,
            )
        }
        What::Batch => batch(options, &workspace),
        What::Events => events(options, &workspace),
    }
}

/// What `hits-bench` is told.
fn hits(options: &Options, workspace: &Workspace, rig: Kind) -> Result<Vec<String>> {
    let mut arguments = vec![
        format!("--calls={}", options.calls),
        format!("--repeats={}", options.repeats),
        format!("--rounds={}", options.rounds),
        format!("--gdb-hits={}", options.gdb_hits),
    ];
    if rig.ticks_are_instructions() {
        arguments.push("--ticks-are-instructions".to_owned());
    }
    let counts = instructions::count(workspace, !options.dev)?;
    arguments.extend(counts.iter().map(|it| format!("--instructions={it}")));
    Ok(arguments)
}

/// Probes by the thousand, on the text of the guest's kernel.
fn batch(options: &Options, workspace: &Workspace) -> Result<ExitCode> {
    let mut packages = vec![
        "--package=hvprobe-introspect",
        "--example=batch_cost",
        "--package=hvprobe-cli",
        "--bins",
    ];
    if !options.dev {
        packages.push("--release");
    }
    let built = workspace.build(&packages)?;
    let ready = Ready::make(Kind::Direct, false, true)?;
    let folder = tempfile::tempdir()?;
    let kernel = folder.path().join("vmlinux");
    let mut unpack = Command::new(cargo::program_named(&built, "hvprobe")?);
    unpack.arg("unpack").arg(ready.kernel.image()).arg(&kernel);
    let status = run_here(&mut unpack)?;
    if status != ExitCode::SUCCESS {
        return Ok(status);
    }
    let mut command = Command::new(cargo::program_named(&built, "batch_cost")?);
    run_here(command.arg(&kernel).arg(BATCH.to_string()))
}

/// Runs `command` on this machine; returns the status to exit with.
fn run_here(command: &mut Command) -> Result<ExitCode> {
    process::end_with_us(command);
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(run::LAB_FAILED)))
}

/// The way of events, which needs neither guest nor rig.
fn events(options: &Options, workspace: &Workspace) -> Result<ExitCode> {
    let mut packages = vec!["--package=hvprobe-tests", "--example=event_path"];
    if !options.dev {
        packages.push("--release");
    }
    let built = workspace.build(&packages)?;
    let mut command = Command::new(cargo::program_named(&built, "event_path")?);
    run_here(command.arg(options.seconds.to_string()))
}

/// Runs `program` of this package in a rig that has hvprobe and, if it is to be `with_qemu`, QEMU;
/// with the arguments that it takes in that rig.
fn bench(
    options: &Options,
    workspace: &Workspace,
    program: &str,
    with_qemu: bool,
    arguments: impl FnOnce(Kind) -> Result<Vec<String>>,
) -> Result<ExitCode> {
    let mut packages = run::PROGRAMS.to_vec();
    packages.push("--package=hvprobe-lab");
    if !options.dev {
        packages.push("--release");
    }
    let built = workspace.build(&packages)?;
    let rig = choose(options.rig, &cargo::program_named(&built, "hvprobe")?)?;
    let arguments = arguments(rig)?;
    let ready = Ready::make(rig, false, true)?;
    if with_qemu {
        packages::ensure(&["qemu-system-x86"])?;
    }

    let mut job = Job::new(&built, options.machine.timeout(rig.time_limit()));
    options.machine.apply(&mut job);
    let path = cargo::program_named(&built, program)?;
    job.programs.push((program.to_owned(), path));
    let guest = if rig == Kind::Direct {
        ready.cache.root().join("guest")
    } else {
        if with_qemu {
            job.programs
                .push((QEMU.to_owned(), Path::new("/usr/bin").join(QEMU)));
            job.files = QEMU_FILES
                .iter()
                .map(|path| (path.trim_start_matches('/').to_owned(), PathBuf::from(path)))
                .collect();
        }
        PathBuf::from("/guest")
    };
    job.stdio = Stdio::of_stdout();
    job.environment = run::environment(rig);
    job.steps.push(Step {
        program: program.to_owned(),
        arguments: arguments
            .iter()
            .map(Into::into)
            .chain(["--guest".into(), guest.into()])
            .collect(),
        test: None,
        package: None,
    });
    run::run_job(rig, &ready, &job)
}
