//! No emulation: the steps run on this machine, with its `/dev/kvm`.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::Result;

use crate::image::BUSYBOX;
use crate::job::{CARGO, Job, Stdio as JobStdio, Step};
use crate::libtest;
use crate::outcome::{Finish, Listener, Outcome, stood_still};
use crate::overdue::Watch;
use crate::place::CACHE_VARIABLE;
use crate::process::{self, Apart, Audience, End, Group, Limits, Streams};
use crate::retry;
use crate::setup::Ready;
use crate::signals::Signals;
use crate::stacks;

/// Status of a program that the lab ended because a test was late. It is libtest's status for failed tests.
const TESTS_FAILED: u8 = 101;

pub(super) fn run(ready: &Ready, job: &Job, listener: &mut dyn Listener) -> Result<Outcome> {
    run_with(ready.guest.root(), job, listener)
}

/// Like [`run`], but gives programs `cache` as the cache folder.
fn run_with(cache: &Path, job: &Job, listener: &mut dyn Listener) -> Result<Outcome> {
    let limits = Limits {
        deadline: Instant::now() + job.timeout,
        silence: job.silence,
    };
    let signals = Signals::take()?;
    let mut statuses = vec![None; job.steps.len()];
    for (number, step) in job.steps.iter().enumerate() {
        listener.begin(number);
        let (mut step, mut failed) = (step.clone(), false);
        let status = loop {
            let finish = match once(cache, job, &step, limits, &signals, listener)? {
                Came::Ended(_) if failed => break TESTS_FAILED,
                Came::Ended(status) => break status,
                Came::Overdue { unheard } if unheard.is_empty() => break TESTS_FAILED,
                Came::Overdue { unheard } => {
                    failed = true;
                    let unheard = unheard.iter().map(String::as_str);
                    step.arguments = retry::only(&step.arguments, unheard);
                    continue;
                }
                Came::Broke(finish) => finish,
            };
            return Ok(Outcome {
                statuses,
                finish,
                log: None,
            });
        };
        listener.end(number, status);
        statuses[number] = Some(status);
    }
    Ok(Outcome {
        statuses,
        finish: Finish::Complete,
        log: None,
    })
}

/// Result of running a step once.
enum Came {
    /// The step ended with this status.
    Ended(u8),
    /// The lab ended the step because a test was late. The `unheard` tests have no result.
    Overdue { unheard: Vec<String> },
    /// The rest of the job cannot be run.
    Broke(Finish),
}

/// Runs a step once.
fn once(
    cache: &Path,
    job: &Job,
    step: &Step,
    limits: Limits,
    signals: &Signals,
    listener: &mut dyn Listener,
) -> Result<Came> {
    let (mut command, output) = command(cache, job, step)?;
    let apart = match job.stdio {
        JobStdio::Interactive => Apart::No,
        JobStdio::Plain | JobStdio::Terminal => Apart::Group,
    };
    let mut group = Group::start(&mut command, apart)?;
    // Close the copy of the pipe's write end that the command holds, so that the pipe ends with its writers.
    drop(command);
    let mut streams = Streams {
        output,
        discard: None,
        keyboard: None,
    };
    // `None` for cargo, which runs the examples of the documentation: it builds them first, and cannot list them.
    let tests = program(job, step).filter(|_| step.program != CARGO && step.is_tests());
    let mut words = Words {
        listener,
        watch: job
            .test_limit
            .filter(|_| step.is_tests())
            .map(|limit| Watch::new(limit, tests.is_some())),
    };
    let end = process::watch(&mut group, &mut streams, limits, signals, &mut words)?;
    let (signal, finish) = match end {
        End::Exited(status) => return Ok(Came::Ended(shell_status(status))),
        End::Stopped => {
            let finish = Finish::Broken("the output was not wanted any more".to_owned());
            return Ok(Came::Broke(finish));
        }
        End::Overdue => {
            let stacks = stacks::of_group(group.id());
            drop(group);
            return words.overdue(step, tests.as_deref(), &stacks);
        }
        End::Interrupted(signal) => (signal, Finish::Interrupted(signal)),
        End::TimedOut => (libc::SIGTERM, Finish::TimedOut),
        End::Silent => {
            let reason = stood_still(&step.program, job.silence);
            (libc::SIGTERM, Finish::Broken(reason))
        }
    };
    process::wind_down(&mut group, signal, &mut streams, signals, &mut words)?;
    Ok(Came::Broke(finish))
}

/// Returns the path of the step's program, or `None` for an applet of busybox.
fn program(job: &Job, step: &Step) -> Option<PathBuf> {
    let mut programs = job.programs.iter();
    programs.find_map(|(name, path)| (*name == step.program).then(|| path.clone()))
}

/// Returns the step as a command, and the read end of its output if that is captured.
fn command(cache: &Path, job: &Job, step: &Step) -> Result<(Command, Option<File>)> {
    let mut command = match program(job, step) {
        Some(path) => Command::new(path),
        None => {
            let mut command = Command::new(BUSYBOX);
            command.arg0(&step.program);
            command
        }
    };
    command
        .args(&step.arguments)
        .env(CACHE_VARIABLE, cache)
        .env("PATH", path_with_programs(job));
    if let Some(package) = &step.package {
        // Like cargo for the tests of a package.
        command
            .current_dir(package)
            .env("CARGO_MANIFEST_DIR", package);
    }
    for (name, value) in &job.environment {
        command.env(name, value);
    }
    if job.stdio != JobStdio::Interactive {
        command.stdin(Stdio::null());
    }
    if !job.captured {
        return Ok((command, None));
    }
    let (reader, writer) = io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    Ok((command, Some(File::from(OwnedFd::from(reader)))))
}

/// Returns the lab's `PATH`, with the folders of the job's programs first.
fn path_with_programs(job: &Job) -> OsString {
    let mut folders: Vec<PathBuf> = Vec::new();
    for (_, path) in &job.programs {
        if let Some(folder) = path.parent()
            && !folders.iter().any(|known| known == folder)
        {
            folders.push(folder.to_path_buf());
        }
    }
    let inherited = env::var_os("PATH").unwrap_or_default();
    folders.extend(env::split_paths(&inherited));
    env::join_paths(folders).unwrap_or(inherited)
}

/// Returns the exit status as the number that a shell has in `$?`.
fn shell_status(status: ExitStatus) -> u8 {
    let number = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 255,
    };
    u8::try_from(number).unwrap_or(255)
}

/// Passes all output to the listener, and watches for tests that are late.
struct Words<'a> {
    listener: &'a mut dyn Listener,
    watch: Option<Watch>,
}

impl Audience for Words<'_> {
    fn output(&mut self, bytes: &[u8]) -> Result<ControlFlow<()>> {
        if let Some(watch) = &mut self.watch {
            watch.read(bytes, Instant::now());
        }
        self.listener.output(bytes)?;
        Ok(ControlFlow::Continue(()))
    }

    fn deadline(&self) -> Option<Instant> {
        self.watch.as_ref()?.deadline()
    }
}

impl Words<'_> {
    /// Handles a program that was ended because a test was late. Gives the listener the output with which libtest
    /// would have reported the late tests as failed. Returns the tests that have no result.
    fn overdue(self, step: &Step, tests: Option<&Path>, stacks: &str) -> Result<Came> {
        let Some(watch) = self.watch else {
            return Ok(Came::Ended(TESTS_FAILED));
        };
        let late = watch.late(Instant::now());
        let shown = if late.is_empty() {
            // It is not known which test hangs, so no test can be run again.
            vec!["(the program as a whole)".to_owned()]
        } else {
            late.clone()
        };
        self.listener
            .output(watch.closing(&shown, stacks).as_bytes())?;
        let unheard = match tests {
            Some(path) if !late.is_empty() => {
                watch.unheard(libtest::list(path, &step.arguments)?, &late)
            }
            _ => Vec::new(),
        };
        Ok(Came::Overdue { unheard })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use crate::report::Report;
    use crate::retry::Ran;

    /// Script that stands in for a test program that hangs in one of its tests.
    const HANGS: &str = r#"#!/bin/sh
case "$*" in
*--list*)
    printf 'hangs: test\nlater: test\npasses: test\n' ;;
"--exact later")
    printf 'test later ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored\n' ;;
"")
    printf 'running 3 tests\ntest passes ... ok\n'
    printf 'test hangs has been running for over 60 seconds\n'
    exec sleep 1000 ;;
*)
    echo "unexpected: $*"; exit 3 ;;
esac
"#;

    #[test]
    fn a_test_that_does_not_end_fails_with_its_stacks_and_the_others_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hangs");
        fs::write(&path, HANGS).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let mut job = Job::new(&[], Duration::from_secs(120));
        job.captured = true;
        job.test_limit = Some(Duration::from_secs(60));
        job.programs.push(("hangs".to_owned(), path));
        job.steps.push(Step::new("hangs", [""; 0]));
        let mut report = Report::silent(&job.steps);
        let outcome = run_with(folder.path(), &job, &mut report).unwrap();
        assert_eq!(outcome.finish, Finish::Complete);
        let ran = report.finish();
        let [
            Ran::Ended {
                status,
                counts,
                failures,
                ..
            },
        ] = &ran[..]
        else {
            panic!("{ran:?}");
        };
        assert_eq!(*status, TESTS_FAILED);
        assert_eq!(counts.to_string(), "2 passed, 1 failed, 0 skipped");
        assert_eq!(failures[0].test, "hangs");
        assert_eq!(failures[0].why, "did not end within 60 s");
    }

    #[test]
    fn stacks_of_a_group_are_those_of_its_processes() {
        let mut command = Command::new("sleep");
        let group = Group::start(command.arg("1000"), Apart::Group).unwrap();
        let stacks = stacks::of_group(group.id());
        let mut lines = stacks.lines();
        let first = lines.next().unwrap_or_default();
        assert_eq!(first, format!("process {} (sleep):", group.id()));
        // If there is no gdb, or it may not attach, the text says so.
        let second = lines.next().unwrap_or_default();
        assert!(
            second.starts_with('#')
                || second.starts_with("Thread ")
                || second.starts_with("no stacks"),
            "{stacks}"
        );
    }

    #[test]
    fn status_of_a_killed_program_is_what_a_shell_says() {
        assert_eq!(shell_status(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(shell_status(ExitStatus::from_raw(9)), 137);
    }
}
