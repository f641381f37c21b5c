//! `cargo lab demo`: boots a stock Debian kernel under hvprobe, with three probes in it.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::cargo::{self, Workspace};
use crate::choose::choose;
use crate::estimate::{self, Work};
use crate::job::{Job, Stdio, Step};
use crate::kind::Kind;
use crate::prefetch::{Fetch, Wanted};
use crate::progress;
use crate::run::{self, MachineOptions};
use crate::setup::Ready;

/// Where to show it.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Machine to run on [default: direct if its KVM can run Linux guests, else tcg]
    #[arg(long, value_enum)]
    rig: Option<Kind>,
    #[command(flatten)]
    machine: MachineOptions,
}

/// Estimate of the work.
const WORK: Work = Work {
    build: Duration::from_secs(180),
    rest: Duration::from_secs(20),
};

/// Arguments of a command of hvprobe that a user might begin with.
const ARGUMENTS: [&str; 13] = [
    "run",
    "-p",
    "p vfs_read",
    "-p",
    "p:open do_sys_openat2",
    "-p",
    "p __x64_sys_getpgid",
    "--hits",
    "30",
    "--",
    "sh",
    "-c",
    "workload calls getpgid 5; cat /proc/version",
];

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    estimate::say(WORK, &workspace);
    let fetch = Fetch::start(Wanted::default());
    let built = workspace.build(&run::PROGRAMS)?;
    drop(fetch);
    let hvprobe = cargo::program_named(&built, "hvprobe")?;
    let rig = choose(options.rig, &hvprobe)?;
    let ready = Ready::make(rig, None)?;
    let mut job = Job::new(&built, options.machine.timeout(600));
    options.machine.apply(&mut job);
    job.stdio = Stdio::of_stdout();
    job.environment = run::environment(rig);
    job.steps.push(Step::new("hvprobe", ARGUMENTS));
    progress::note(&format!("$ {}", typed()));
    run::run_job(rig, &ready, &job)
}

/// Returns the command as a user types it. Words with blanks are in quotes.
fn typed() -> String {
    let mut line = "hvprobe".to_owned();
    for word in ARGUMENTS {
        line.push(' ');
        if word.contains(' ') {
            line.push_str(&format!("'{word}'"));
        } else {
            line.push_str(word);
        }
    }
    line
}
