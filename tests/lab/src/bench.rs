//! `cargo lab bench`: measures what hvprobe costs, and what its references cost in the same rig.

use std::ffi::OsString;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use hvprobe_lab::documented;

use crate::cargo::{self, Executable, Workspace};
use crate::choose::choose;
use crate::instructions;
use crate::job::{Job, Stdio, Step};
use crate::kernel::Choice;
use crate::kind::Kind;
use crate::outcome::{Finish, Listener};
use crate::packages;
use crate::process::{self, Audience, End, Limits};
use crate::progress;
use crate::record::Recorder;
use crate::rig;
use crate::run::{self, MachineOptions};
use crate::setup::Ready;

/// What to measure, and where.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Benchmark to run
    #[arg(value_enum, default_value = "boot")]
    what: What,
    /// Machine to run on [default: direct if its KVM can run Linux guests, else tcg]
    #[arg(long, value_enum)]
    rig: Option<Kind>,
    /// boot: number of boots of each VMM; the table shows medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// hits: number of calls in each loop
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..))]
    calls: u32,
    /// hits: number of times that each loop is timed; the table shows the fastest and the median
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// hits: number of rounds that compare a program with and without a probe; 0 skips them
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// hits: number of hits of gdb's breakpoint, which take minutes in an emulated machine; 0 skips them
    #[arg(long, default_value_t = 200)]
    gdb_hits: u32,
    /// events: duration of the measurement of each rate, in seconds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// boot, hits, batch: guest kernel, a name (see `cargo lab test --help`) or a file [default: the stock kernel]
    #[arg(long, value_name = "NAME|FILE", value_parser = Choice::parse)]
    kernel: Option<Choice>,
    /// Run a short form of the benchmark, with a development build and few calls; its numbers mean nothing
    ///
    /// Fails if the headings of the tables are not those in docs/performance.md.
    #[arg(long)]
    smoke: bool,
    /// Measure a development build, which builds faster but runs slower
    #[arg(long)]
    dev: bool,
    /// Record in docs/hosts.md whether the benchmark passed; refused if the tree has changes
    #[arg(long)]
    record: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

/// The measurements there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Boots of the stock kernel under hvprobe and QEMU (microvm, q35): time from the start of the process to the
    /// first guest instruction and to /init, and memory beyond the guest's RAM
    Boot,
    /// Cost of one hit, for each mechanism, for the guest's own kprobe and kretprobe events, and for a breakpoint
    /// of gdb: time, exits, ioctls, and the engine's instructions (counted on this machine with valgrind); also the
    /// slowdown of a program that does little but system calls. On bochs, which counts instructions instead of
    /// time, `--calls 1000 --rounds 3 --gdb-hits 0` is enough
    Hits,
    /// Time to plant 10,000 probes at once in the text of the stock kernel, and the part of it for which the guest
    /// is stopped. Runs on this machine, without a guest
    Batch,
    /// Events per second that reach a gRPC client, and their cost in CPU time and memory. Runs on this machine,
    /// with synthetic events and without a guest
    Events,
}

impl What {
    fn targets(self) -> &'static [&'static str] {
        match self {
            Self::Boot => &["--bin=hvprobe", "--bin=workload", "--bin=boot-bench"],
            Self::Hits => &[
                "--bin=hvprobe",
                "--bin=workload",
                "--bin=hits-bench",
                "--example=hit_cost",
            ],
            Self::Batch => &["--bin=hvprobe", "--example=batch_cost"],
            Self::Events => &["--example=event_path"],
        }
    }
}

/// Name of the program of Debian's QEMU.
const QEMU: &str = "qemu-system-x86_64";
/// Further files that Debian's QEMU needs: the TCG module, which is part of the program since QEMU 10, and
/// firmware.
const QEMU_FILES: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so",
    "/usr/share/qemu/bios-microvm.bin",
    "/usr/share/qemu/qboot.rom",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/share/seabios/bios-256k.bin",
];

/// Number of probes in a batch.
const BATCH: u32 = 10_000;
/// Number of probes in a batch of the short form (`--smoke`).
const SMALL_BATCH: u32 = 300;
/// Time limit of the short form as a whole, in seconds.
const SMOKE_LIMIT: u64 = 900;
/// Time limit for one answer of a guest in the short form, in seconds.
const SMOKE_PATIENCE: u64 = 60;
/// Maximum number of bytes that are kept of a bench's output. The newest bytes are kept.
const MOST_KEPT: usize = 1 << 18;

impl Options {
    /// Builds the programs of the bench in one build. For the short form, builds everything that the tests need.
    fn build(&self, workspace: &Workspace) -> Result<Vec<Executable>> {
        if self.smoke {
            return workspace.build(&cargo::EVERYTHING);
        }
        let mut targets = self.what.targets().to_vec();
        if !self.dev {
            targets.push("--release");
        }
        workspace.build(&targets)
    }

    /// Returns the name of the row for the result in the table of docs/hosts.md.
    fn row(&self) -> String {
        let name = self.what.to_possible_value();
        let name = name.as_ref().map_or("", |value| value.get_name());
        let form = if self.smoke { " --smoke" } else { "" };
        format!("bench {name}{form}")
    }

    fn timeout(&self, rig: Kind) -> Duration {
        let limit = if self.smoke {
            SMOKE_LIMIT
        } else {
            rig.time_limit()
        };
        self.machine.timeout(limit)
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let start = || Recorder::start(&workspace, Some(&options.row()));
    let mut recorder = options.record.then(start).transpose()?;
    let guests = |ready: &Ready| match &mut recorder {
        Some(recorder) => recorder.with_guests(ready, options.kernel.as_ref()),
        None => Ok(()),
    };
    let heard = match options.what {
        What::Boot => {
            let runs = if options.smoke { 1 } else { options.runs };
            let arguments = ["--runs".to_owned(), runs.to_string()];
            let arguments = |_, _: &[Executable]| Ok(arguments.into());
            bench(options, &workspace, "boot-bench", true, arguments, guests)?
        }
        What::Hits => {
            let with_qemu = options.gdb_hits > 0 && !options.smoke;
            let arguments = |rig, built: &[Executable]| hits(options, built, rig);
            bench(
                options,
                &workspace,
                "hits-bench",
                with_qemu,
                arguments,
                guests,
            )?
        }
        What::Batch => batch(options, &workspace, guests)?,
        What::Events => events(options, &workspace)?,
    };
    let checked = match options.smoke && heard.status == 0 {
        true => check_headings(options.what, &heard.text()),
        false => Ok(()),
    };
    if let (Some(mut recorder), Some(host)) = (recorder, heard.ended_on) {
        recorder.see_one(host, heard.status == 0 && checked.is_ok());
        recorder.write()?;
    }
    checked?;
    Ok(ExitCode::from(heard.status))
}

/// Fails if the headings of the printed tables are not those in docs/performance.md.
fn check_headings(what: What, printed: &str) -> Result<()> {
    let file = documented::PERFORMANCE;
    let page = documented::page(file)?;
    let name = what.to_possible_value().context("a bench without a name")?;
    let mut all = documented::headings(&page, "boot");
    let mut shown = all.remove(name.get_name()).unwrap_or_default();
    let mut printed: Vec<_> = printed.lines().filter_map(documented::heading).collect();
    shown.sort();
    printed.sort();
    if shown != printed {
        bail!("{file} shows tables with {shown:#?}, but these were printed: {printed:#?}");
    }
    progress::note(&format!("{} tables as in {file}", printed.len()));
    Ok(())
}

/// Returns the arguments for `hits-bench`.
fn hits(options: &Options, built: &[Executable], rig: Kind) -> Result<Vec<String>> {
    let mut arguments = match options.smoke {
        true => vec![
            "--calls=100".to_owned(),
            "--rounds=1".to_owned(),
            "--gdb-hits=0".to_owned(),
            format!("--patience={SMOKE_PATIENCE}"),
        ],
        false => vec![
            format!("--calls={}", options.calls),
            format!("--repeats={}", options.repeats),
            format!("--rounds={}", options.rounds),
            format!("--gdb-hits={}", options.gdb_hits),
        ],
    };
    if rig.ticks_are_instructions() {
        arguments.push("--ticks-are-instructions".to_owned());
    }
    let counts = instructions::count(built)?;
    arguments.extend(counts.iter().map(|it| format!("--instructions={it}")));
    Ok(arguments)
}

/// Measures a batch of probes in the text of the guests' kernel.
fn batch(
    options: &Options,
    workspace: &Workspace,
    guests: impl FnOnce(&Ready) -> Result<()>,
) -> Result<Heard> {
    let built = options.build(workspace)?;
    let ready = Ready::make(Kind::Direct, options.kernel.as_ref())?;
    guests(&ready)?;
    let folder = tempfile::tempdir()?;
    let kernel = folder.path().join("vmlinux");
    let mut unpack = Command::new(cargo::program_named(&built, "hvprobe")?);
    unpack.arg("unpack").arg(ready.guest.kernel()).arg(&kernel);
    let heard = run_here(&mut unpack, options)?;
    if heard.status != 0 {
        return Ok(heard);
    }
    let number = if options.smoke { SMALL_BATCH } else { BATCH };
    let mut command = Command::new(cargo::program_named(&built, "batch_cost")?);
    run_here(command.arg(&kernel).arg(number.to_string()), options)
}

/// Measures the path of events, which needs neither guest nor rig.
fn events(options: &Options, workspace: &Workspace) -> Result<Heard> {
    let built = options.build(workspace)?;
    let mut command = Command::new(cargo::program_named(&built, "event_path")?);
    let length = match options.smoke {
        true => "--smoke".to_owned(),
        false => options.seconds.to_string(),
    };
    run_here(command.arg(length), options)
}

/// Output of a bench, printed as it arrives, and its exit status.
#[derive(Debug, Default)]
struct Heard {
    bytes: Vec<u8>,
    status: u8,
    /// Machine on which the bench passed or failed; `None` if it was interrupted.
    ended_on: Option<Kind>,
}

impl Heard {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).replace('\r', "")
    }

    /// Returns the reason of a failure: the bench's last error message, or else the last line of the output.
    fn last_word(&self) -> String {
        let text = self.text();
        let complaint = text.lines().rfind(|line| line.contains("-bench: "));
        let last = complaint.or(text.lines().last());
        last.unwrap_or("it said nothing").trim().to_owned()
    }
}

impl Listener for Heard {
    fn output(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        let surplus = self.bytes.len().saturating_sub(MOST_KEPT);
        self.bytes.drain(..surplus);
        progress::pass_on(bytes)
    }
}

impl Audience for Heard {
    fn output(&mut self, bytes: &[u8]) -> Result<ControlFlow<()>> {
        Listener::output(self, bytes)?;
        Ok(ControlFlow::Continue(()))
    }
}

/// Runs `command` on this machine, within the time limit of the options.
fn run_here(command: &mut Command, options: &Options) -> Result<Heard> {
    let limits = Limits {
        deadline: Instant::now() + options.timeout(Kind::Direct),
        silence: None,
    };
    let mut heard = Heard::default();
    let end = process::run(command, false, limits, &mut heard)?;
    heard.status = match end {
        End::Exited(status) => run::code(status),
        End::TimedOut => bail!("the time was over; {} was ended", name(command)),
        _ => bail!("{} was ended", name(command)),
    };
    heard.ended_on = Some(Kind::Direct);
    Ok(heard)
}

fn name(command: &Command) -> String {
    command.get_program().display().to_string()
}

/// Runs `program` of this package in a rig with hvprobe and, if `with_qemu`, QEMU. `arguments` returns the
/// arguments of the program for the chosen rig. `guests` is called before the run, with the result of the setup. A
/// failed run in an emulated rig is repeated.
fn bench(
    options: &Options,
    workspace: &Workspace,
    program: &str,
    with_qemu: bool,
    arguments: impl FnOnce(Kind, &[Executable]) -> Result<Vec<String>>,
    guests: impl FnOnce(&Ready) -> Result<()>,
) -> Result<Heard> {
    let built = options.build(workspace)?;
    let rig = choose(options.rig, &cargo::program_named(&built, "hvprobe")?)?;
    let arguments = arguments(rig, &built)?;
    let ready = Ready::make(rig, options.kernel.as_ref())?;
    guests(&ready)?;
    if with_qemu {
        packages::ensure(&["qemu-system-x86"])?;
    }

    let mut job = Job::new(&built, options.timeout(rig));
    options.machine.apply(&mut job);
    if options.what == What::Hits {
        // This bench does one thing at a time, and an emulated machine survives longer with one CPU.
        job.cpus.get_or_insert(1);
    }
    job.captured = true;
    if options.smoke {
        // A short form that prints nothing for this long hangs.
        job.silence = rig.silence();
    }
    let path = cargo::program_named(&built, program)?;
    job.programs.push((program.to_owned(), path));
    let guest = if rig == Kind::Direct {
        ready.guest.folder()
    } else {
        if with_qemu {
            job.programs
                .push((QEMU.to_owned(), Path::new("/usr/bin").join(QEMU)));
            let there = QEMU_FILES.iter().map(Path::new).filter(|it| it.exists());
            job.files = there
                .filter_map(|path| {
                    let within = path.strip_prefix("/").ok()?;
                    Some((within.to_str()?.to_owned(), path.to_owned()))
                })
                .collect();
        }
        PathBuf::from("/guest")
    };
    job.stdio = Stdio::of_stdout();
    job.environment = run::environment(rig);
    let arguments = arguments.into_iter().map(OsString::from);
    let arguments = arguments.chain(["--guest".into(), guest.into()]);
    job.steps.push(Step::new(program, arguments));
    tried(rig, &ready, &job, program)
}

/// Runs the job of one bench. In an emulated rig a failed try is repeated as often as for a test. The output of a
/// failed try stays in a file, and a bench that passes only at a later try is reported as flaky.
fn tried(rig: Kind, ready: &Ready, job: &Job, program: &str) -> Result<Heard> {
    let tries = 1 + rig.retries();
    let (mut first, mut number) = (None, 0);
    loop {
        number += 1;
        let mut heard = Heard::default();
        let outcome = rig::run(rig, ready, job, &mut heard)?;
        heard.status = run::report(&outcome);
        let why = match &outcome.finish {
            Finish::Interrupted(_) => return Ok(heard),
            Finish::Complete if heard.status == 0 => {
                heard.ended_on = Some(rig);
                if let Some(first) = first {
                    println!("flaky: {program} (passed at try {number}; first: {first})");
                }
                return Ok(heard);
            }
            Finish::Complete => heard.last_word(),
            Finish::TimedOut => "the time was over".to_owned(),
            Finish::Broken(reason) => reason.clone(),
        };
        let labs = ready.workspace.target.join("lab");
        fs::create_dir_all(&labs)?;
        let file = labs.join(format!("{program}-try-{number}.log"));
        fs::write(&file, &heard.bytes)?;
        let words = file.display();
        progress::note(&format!(
            "try {number} of {tries} failed: {why}; its words: {words}"
        ));
        if number == tries {
            heard.ended_on = Some(rig);
            return Ok(heard);
        }
        first.get_or_insert(why);
    }
}
