//! `cargo lab test`: every test of the workspace, on this machine and in a rig.
//!
//! Tests are built once. Those of `tests/tests/rig_*.rs` need KVM that can run Linux guests and
//! run in the rig only; `tests/tests/micro_*.rs` run on any KVM, on this machine and in the rig;
//! all others, and the examples in the documentation, run on this machine.

use std::ffi::OsString;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use crate::cargo::{self, Executable, Workspace};
use crate::choose::choose;
use crate::job::{Job, Step};
use crate::libtest::{Counts, Parser};
use crate::progress;
use crate::rig::{Finish, Kind, Listener, Outcome};
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
    /// Passed to every test program: a filter, --exact, --skip NAME, --ignored, ...
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

/// Where a test program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Here,
    Rig,
    Both,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let built = workspace.build(&["--workspace", "--bins", "--tests"])?;
    let hvprobe = cargo::program_named(&built, "hvprobe")?;
    let rig = choose(options.rig, &hvprobe)?;
    let ready = Ready::make(rig, false, true)?;

    let deadline = Instant::now() + options.machine.timeout(1500);
    let mut report = Report::default();
    if !options.rig_only {
        let mut job = job_here(&ready, &built, options, deadline);
        job.captured = true;
        let outcome = report.follow(&job, Kind::Direct, &ready)?;
        if !goes_on(&outcome) {
            return Ok(report.close(&outcome));
        }
    }
    let mut job = job_in_rig(&ready, &built, rig, options, deadline);
    options.machine.apply(&mut job);
    job.captured = true;
    if job.steps.is_empty() {
        progress::note("no tests for the rig");
    }
    let outcome = if job.steps.is_empty() {
        Outcome::nothing()
    } else {
        report.follow(&job, rig, &ready)?
    };
    Ok(report.close(&outcome))
}

fn goes_on(outcome: &Outcome) -> bool {
    outcome.finish == Finish::Complete
}
