//! No emulation: the steps run on this machine, with its `/dev/kvm`.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::Result;

use super::{Finish, Listener, Outcome, stood_still};
use crate::image::BUSYBOX;
use crate::job::{Job, Stdio as JobStdio, Step};
use crate::place::CACHE_VARIABLE;
use crate::process::{self, Apart, Audience, End, Group, Limits, Streams};
use crate::setup::Ready;
use crate::signals::Signals;

pub(super) fn run(ready: &Ready, job: &Job, listener: &mut dyn Listener) -> Result<Outcome> {
    let limits = Limits {
        deadline: Instant::now() + job.timeout,
        silence: job.silence,
    };
    let signals = Signals::take()?;
    let mut statuses = vec![None; job.steps.len()];
    for (number, step) in job.steps.iter().enumerate() {
        listener.begin(number);
        let (mut command, output) = command(ready, job, step)?;
        let apart = match job.stdio {
            JobStdio::Interactive => Apart::No,
            JobStdio::Plain | JobStdio::Terminal => Apart::Group,
        };
        let mut group = Group::start(&mut command, apart)?;
        // Its copies of the pipe's writing side go now, so that the pipe can end.
        drop(command);
        let mut streams = Streams {
            output,
            discard: None,
            keyboard: None,
        };
        let mut words = Words(listener);
        let end = process::watch(&mut group, &mut streams, limits, &signals, &mut words)?;
        let finish = match end {
            End::Exited(status) => {
                let status = shell_status(status);
                listener.end(number, status);
                statuses[number] = Some(status);
                continue;
            }
            End::Interrupted(signal) => {
                process::wind_down(&mut group, signal, &mut streams, &signals, &mut words)?;
                Finish::Interrupted(signal)
            }
            End::TimedOut => {
                let signal = libc::SIGTERM;
                process::wind_down(&mut group, signal, &mut streams, &signals, &mut words)?;
                Finish::TimedOut
            }
            End::Silent => {
                let signal = libc::SIGTERM;
                process::wind_down(&mut group, signal, &mut streams, &signals, &mut words)?;
                Finish::Broken(stood_still(&step.program, job.silence))
            }
            End::Stopped => Finish::Broken("the output was not wanted any more".to_owned()),
        };
        return Ok(Outcome {
            statuses,
            finish,
            log: None,
        });
    }
    Ok(Outcome {
        statuses,
        finish: Finish::Complete,
        log: None,
    })
}

/// The step as a command, and the reading side of its output if that is captured.
fn command(ready: &Ready, job: &Job, step: &Step) -> Result<(Command, Option<File>)> {
    let ours = job
        .programs
        .iter()
        .find(|(name, _)| *name == step.program)
        .map(|(_, path)| path.clone());
    let mut command = match ours {
        Some(path) => Command::new(path),
        None => {
            let mut command = Command::new(BUSYBOX);
            command.arg0(&step.program);
            command
        }
    };
    command
        .args(&step.arguments)
        .env(CACHE_VARIABLE, ready.cache.root())
        .env("PATH", path_with_programs(job));
    if let Some(package) = &step.package {
        // As cargo does for a package's tests.
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

/// The lab's `PATH`, with the folders of the job's programs first.
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

/// The exit status as a shell has it in `$?`.
fn shell_status(status: ExitStatus) -> u8 {
    let number = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 255,
    };
    u8::try_from(number).unwrap_or(255)
}

/// Gives all output to the listener.
struct Words<'a>(&'a mut dyn Listener);

impl Audience for Words<'_> {
    fn output(&mut self, bytes: &[u8]) -> Result<ControlFlow<()>> {
        self.0.output(bytes)?;
        Ok(ControlFlow::Continue(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_a_killed_program_is_what_a_shell_says() {
        assert_eq!(shell_status(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(shell_status(ExitStatus::from_raw(9)), 137);
    }
}
