//! `cargo lab test`: every test of the workspace, on this machine and in a rig.
//!
//! Tests are built once. Those of `tests/tests/rig_*.rs` need KVM that can run Linux guests and
//! run in the rig only; `tests/tests/micro_*.rs` run on any KVM, on this machine and in the rig;
//! all others, and the examples in the documentation, run on this machine. An emulated rig now and
//! then fails for reasons of its own, so what failed there runs again in a fresh one. Each test is a
//! process of its own there: one that brings the rig down takes no others with it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::cargo::{self, Executable, Workspace};
use crate::choose::choose;
use crate::job::{Job, Step};
use crate::libtest::Counts;
use crate::progress;
use crate::report::Report;
use crate::retry::{self, Book, Due, SHOW};
use crate::rig::{Finish, Kind};
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
    /// Run what failed again, so often at most, in a fresh rig [default: 4 in an emulated rig, else
    /// 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=10))]
    retries: Option<u32>,
    /// End a rig that prints nothing for so many seconds [default: tcg 120, bochs 1800, else never]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    silence: Option<u64>,
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
    let deadline = Instant::now() + options.machine.timeout(rig.time_limit());

    let mut total = Total::default();
    if !options.rig_only {
        let job = job_here(&ready, &built, options);
        total.run(job, Kind::Direct, &ready, deadline, options)?;
    }
    if total.end.is_none() {
        let job = job_in_rig(&ready, &built, rig, options)?;
        total.run(job, rig, &ready, deadline, options)?;
    }
    Ok(total.close())
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
        test: None,
        package: Some(ready.workspace.root.clone()),
    });
    job.environment = vec![(VMLINUZ.to_owned(), ready.cache.guest_kernel().into())];
    job
}

/// The end-to-end tests, without those that ran on this machine already if it is the rig.
fn job_in_rig(ready: &Ready, built: &[Executable], rig: Kind, options: &Options) -> Result<Job> {
    let mut job = new_job(built, options);
    for test in built.iter().filter(|executable| executable.test) {
        let ran_here = rig == Kind::Direct && test.name.starts_with("micro_");
        if is_end_to_end(ready, test) && !ran_here {
            add(&mut job, test, options);
            if rig.is_emulated()
                && let Some(whole) = job.steps.pop()
            {
                job.steps.extend(one_by_one(&test.path, &whole)?);
            }
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
    Ok(job)
}

/// A step for each test that `whole` would run of the program at `path`.
fn one_by_one(path: &Path, whole: &Step) -> Result<Vec<Step>> {
    let output = Command::new(path)
        .args(&whole.arguments)
        .args(["--list", "--format=terse"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", path.display()))?;
    if !output.status.success() {
        bail!("{} does not list its tests", path.display());
    }
    let tests = String::from_utf8_lossy(&output.stdout);
    let tests = tests.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(tests
        .map(|test| Step {
            arguments: retry::only(&whole.arguments, [test]),
            test: Some(test.to_owned()),
            ..whole.clone()
        })
        .collect())
}

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
        test: None,
        package: Some(test.package.clone()),
    });
}

/// The results of all jobs.
#[derive(Debug, Default)]
struct Total {
    counts: Counts,
    flaky: Vec<String>,
    failed: Vec<String>,
    /// Why no more jobs are run, if so.
    end: Option<&'static str>,
}

impl Total {
    /// Runs a job until `deadline`, and what failed of it again in fresh rigs.
    fn run(
        &mut self,
        mut job: Job,
        rig: Kind,
        ready: &Ready,
        deadline: Instant,
        options: &Options,
    ) -> Result<()> {
        if job.steps.is_empty() {
            progress::note(&format!("no tests for rig {}", rig.name()));
            return Ok(());
        }
        job.silence = options.silence.map(Duration::from_secs).or(rig.silence());
        let retries = options.retries.unwrap_or(rig.retries());
        let names = job.steps.iter().map(Step::name).collect();
        let mut book = Book::new(names, retries);
        while !book.due.is_empty() {
            let mut job = part(&job, &book.due);
            job.timeout = deadline.saturating_duration_since(Instant::now());
            let names = job.steps.iter().map(Step::name).collect();
            let mut report = Report::new(names, options.verbose);
            let outcome = rig.run(ready, &job, &mut report)?;
            book.record(report.finish(), &outcome.finish);
            if let Finish::Broken(reason) = &outcome.finish {
                progress::note(reason);
            }
            if let Some(log) = &outcome.log {
                progress::note(&format!("serial log: {}", log.display()));
            }
            self.end = match outcome.finish {
                Finish::Complete | Finish::Broken(_) => None,
                Finish::TimedOut => Some("the time was over (--timeout)"),
                Finish::Interrupted(_) => Some("interrupted"),
            };
            if self.end.is_some() {
                book.give_up();
            }
            match book.due.len() {
                0 => {}
                1 => progress::note("once more, in a fresh rig: 1 step"),
                due => progress::note(&format!("once more, in a fresh rig: {due} steps")),
            }
        }
        self.counts += book.counts;
        self.flaky.extend(book.flaky);
        self.failed.extend(book.failed);
        Ok(())
    }

    /// Prints the closing lines; success if all tests passed, at once or later.
    fn close(&self) -> ExitCode {
        println!();
        if let Some(end) = self.end {
            println!("{end}");
        }
        for line in &self.flaky {
            println!("flaky: {line}");
        }
        for line in &self.failed {
            println!("failed: {line}");
        }
        println!("{}", self.counts);
        if self.end.is_none() && self.failed.is_empty() && self.counts.failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

/// The part of a job that is due, with the programs it needs.
fn part(job: &Job, due: &[Due]) -> Job {
    let mut part = job.clone();
    part.steps = due
        .iter()
        .filter_map(|due| {
            let mut step = job.steps.get(due.step)?.clone();
            if !due.again.is_empty() {
                let again = due.again.iter().map(|failure| failure.test.as_str());
                step.arguments = retry::only(&step.arguments, again);
            }
            Some(step)
        })
        .collect();
    let is_of = |steps: &[Step], name: &str| steps.iter().any(|step| step.program == name);
    part.programs
        .retain(|(name, _)| is_of(&part.steps, name) || !is_of(&job.steps, name));
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests of this very program stand for those of a rig.
    #[test]
    fn each_test_of_a_program_is_a_step() {
        let whole = Step {
            program: "lab-1".to_owned(),
            arguments: [SHOW, "each_test", "--skip", "other"]
                .map(Into::into)
                .to_vec(),
            test: None,
            package: None,
        };
        let path = std::env::current_exe().unwrap();
        let steps = one_by_one(&path, &whole).unwrap();
        let [step] = &steps[..] else {
            panic!("{steps:?}")
        };
        let test = "test::tests::each_test_of_a_program_is_a_step";
        assert_eq!(step.arguments, [SHOW, "--exact", test]);
        assert_eq!(step.name(), format!("lab-1: {test}"));
    }
}
