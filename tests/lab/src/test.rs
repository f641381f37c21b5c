//! `cargo lab test`: every test of the workspace, on this machine and in a rig.
//!
//! Tests are built once. Those of `tests/tests/rig_*.rs` need KVM that can run Linux guests and
//! run in the rig only; `tests/tests/micro_*.rs` run on any KVM, on this machine and in the rig;
//! all others, and the examples in the documentation, run on this machine.

use std::ffi::OsString;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use crate::cargo::{self, Executable, Workspace};
use crate::choose::choose;
use crate::job::{Job, Step};
use crate::libtest::{Counts, Parser};
use crate::progress;
use crate::rig::{Finish, Kind, Listener};
use crate::run::{self, MachineOptions};
use crate::setup::Ready;

/// Which tests to run, and where.
#[derive(Args, Clone, Debug)]
#[command(override_usage = "cargo lab test [OPTIONS] [-- FILTER AND OTHER TEST ARGUMENTS...]")]
pub(crate) struct Options {
    /// The machine for end-to-end tests [default: direct if its KVM can run Linux guests, else
    /// tcg]
    #[arg(long, value_enum)]
    rig: Option<Kind>,
    #[command(flatten)]
    machine: MachineOptions,
    /// Run only the tests that belong in the rig
    #[arg(long)]
    rig_only: bool,
    /// Show everything tests print as they print it, not only what failed ones did
    #[arg(long, short)]
    verbose: bool,
    /// Passed to every test program: a filter, --exact, --skip NAME, --ignored, ...
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let built = workspace.build(&["--workspace", "--bins", "--tests"])?;
    let rig = choose(options.rig, &cargo::program_named(&built, "hvprobe")?)?;
    let ready = Ready::make(rig, false, true)?;
    let deadline = Instant::now() + options.machine.timeout(1200);

    let mut report = Report {
        verbose: options.verbose,
        ..Report::default()
    };
    let mut finish = Finish::Complete;
    if !options.rig_only {
        let job = job_here(&ready, &built, options);
        finish = report.follow(job, Kind::Direct, &ready, deadline)?;
    }
    if finish == Finish::Complete {
        let job = job_in_rig(&ready, &built, rig, options);
        finish = report.follow(job, rig, &ready, deadline)?;
    }
    Ok(report.close(&finish))
}

/// Everything but the tests that only a rig can run.
fn job_here(ready: &Ready, built: &[Executable], options: &Options) -> Job {
    let mut job = new_job(built, options);
    for test in built.iter().filter(|executable| executable.test) {
        if !is_end_to_end(ready, test) || test.name.starts_with("micro_") {
            add(&mut job, test, options);
        }
    }
    let mut arguments: Vec<OsString> = ["test", "--quiet", "--workspace", "--doc", "--"]
        .map(Into::into)
        .to_vec();
    arguments.push(SHOW.into());
    arguments.extend(options.arguments.iter().cloned());
    job.programs
        .push(("cargo".to_owned(), PathBuf::from(cargo::program())));
    job.steps.push(Step {
        program: "cargo".to_owned(),
        arguments,
        package: Some(ready.workspace.root.clone()),
    });
    job.environment = vec![(VMLINUZ.to_owned(), ready.cache.guest_kernel().into())];
    job
}

/// The end-to-end tests, without those that ran on this machine already if it is the rig.
fn job_in_rig(ready: &Ready, built: &[Executable], rig: Kind, options: &Options) -> Job {
    let mut job = new_job(built, options);
    for test in built.iter().filter(|executable| executable.test) {
        let ran_here = rig == Kind::Direct && test.name.starts_with("micro_");
        if is_end_to_end(ready, test) && !ran_here {
            add(&mut job, test, options);
        }
    }
    let kernel = match rig {
        Kind::Direct => ready.cache.guest_kernel(),
        Kind::Tcg | Kind::Bochs => PathBuf::from("/guest/kernel"),
    };
    job.environment = run::environment(rig);
    job.environment.extend([
        (VMLINUZ.to_owned(), kernel.into()),
        // Each test has the machine for itself.
        ("RUST_TEST_THREADS".to_owned(), "1".into()),
    ]);
    job
}

/// Tells libtest to print what passed tests said.
const SHOW: &str = "--show-output";
/// Where tests find the stock kernel's image.
const VMLINUZ: &str = "HVPROBE_TEST_VMLINUZ";

fn new_job(built: &[Executable], options: &Options) -> Job {
    let mut job = Job::new(built, Duration::ZERO);
    options.machine.apply(&mut job);
    job.captured = true;
    job
}

/// Whether `test` is one of `tests/tests/{rig,micro}_*.rs`.
fn is_end_to_end(ready: &Ready, test: &Executable) -> bool {
    test.package == ready.workspace.root.join("tests")
        && (test.name.starts_with("rig_") || test.name.starts_with("micro_"))
}

/// Adds a test program under its file's name, which cargo makes unique.
fn add(job: &mut Job, test: &Executable, options: &Options) {
    let name = test
        .path
        .file_name()
        .map_or_else(|| test.name.clone(), |name| name.to_string_lossy().into());
    job.programs.push((name.clone(), test.path.clone()));
    let mut arguments: Vec<OsString> = vec![SHOW.into()];
    arguments.extend(options.arguments.iter().cloned());
    job.steps.push(Step {
        program: name,
        arguments,
        package: Some(test.package.clone()),
    });
}

/// Shows what failed tests print, adds up the results and remembers which programs failed.
#[derive(Debug, Default)]
struct Report {
    verbose: bool,
    parser: Parser,
    /// When the running program began.
    begun: Option<Instant>,
    counts: Counts,
    /// The names of the running job's programs.
    names: Vec<String>,
    failed: Vec<String>,
}

impl Report {
    /// Runs a job until `deadline`.
    fn follow(
        &mut self,
        mut job: Job,
        rig: Kind,
        ready: &Ready,
        deadline: Instant,
    ) -> Result<Finish> {
        if job.steps.is_empty() {
            progress::note(&format!("no tests for rig {}", rig.name()));
            return Ok(Finish::Complete);
        }
        job.timeout = deadline.saturating_duration_since(Instant::now());
        self.names = job.steps.iter().map(|step| step.program.clone()).collect();
        let outcome = rig.run(ready, &job, self)?;
        let unfinished = self.parser.take();
        self.show(&unfinished.lines);
        for (name, status) in self.names.iter().zip(&outcome.statuses) {
            if status.is_none() {
                self.failed.push(format!("{name} (did not end)"));
                self.counts.failed += 1;
            }
        }
        if let Some(log) = &outcome.log {
            progress::note(&format!("serial log: {}", log.display()));
        }
        Ok(outcome.finish)
    }

    /// Prints what was kept of a program's output, unless it was shown as it came.
    fn show(&self, lines: &[String]) {
        if !self.verbose {
            for line in lines {
                println!("{line}");
            }
        }
    }

    /// Prints the closing lines; success if all tests passed and all programs ended.
    fn close(&self, finish: &Finish) -> ExitCode {
        println!();
        match finish {
            Finish::Complete => {}
            Finish::TimedOut => println!("the time was over (--timeout)"),
            Finish::Interrupted(_) => println!("interrupted"),
            Finish::Broken(reason) => println!("{reason}"),
        }
        for name in &self.failed {
            println!("failed: {name}");
        }
        println!("{}", self.counts);
        if *finish == Finish::Complete && self.failed.is_empty() && self.counts.failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

impl Listener for Report {
    fn begin(&mut self, step: usize) {
        self.begun = Some(Instant::now());
        if let Some(name) = self.names.get(step) {
            println!("     Running {name}");
        }
    }

    fn output(&mut self, bytes: &[u8]) -> Result<()> {
        self.parser.read(bytes);
        if !self.verbose {
            return Ok(());
        }
        let mut stdout = stdout().lock();
        stdout
            .write_all(bytes)
            .and_then(|()| stdout.flush())
            .context("cannot write to stdout")
    }

    fn end(&mut self, step: usize, status: u8) {
        let mut taken = self.parser.take();
        let name = self.names.get(step).map_or("?", String::as_str);
        let seconds = self
            .begun
            .map_or(0.0, |begun| begun.elapsed().as_secs_f64());
        println!("             {} in {seconds:.1} s", taken.counts);
        if status == 0 {
            taken.lines.retain(|line| line.starts_with("skipped:"));
        }
        self.show(&taken.lines);
        if status != 0 && taken.failures.is_empty() {
            // A program that fell over without a result is one failure.
            self.failed.push(format!("{name} (status {status})"));
            taken.counts.failed = taken.counts.failed.max(1);
        }
        for test in taken.failures {
            self.failed.push(format!("{name}: {test}"));
        }
        self.counts += taken.counts;
    }
}
