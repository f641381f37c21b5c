//! `cargo lab test`: runs every test of the workspace, on this machine and in a rig.
//!
//! Tests are built once. Those of `tests/tests/rig/` need KVM that can run Linux guests, and run in the rig only;
//! `tests/tests/micro_*.rs` run on any KVM, on this machine and in the rig; all others, and the examples in the
//! documentation, run on this machine. An emulated rig sometimes fails without any fault of the tests, so a failure
//! there is run again in a fresh rig. In an emulated rig the tests of a module run in one process, because they
//! share guests.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;

use crate::cargo::{self, Executable, Workspace};
use crate::choose::choose;
use crate::estimate;
use crate::groups;
use crate::job::{CARGO, Job};
use crate::kind::Kind;
use crate::outcome;
use crate::prefetch::Fetch;
use crate::progress;
use crate::record::Recorder;
use crate::repeat;
use crate::seeds::Seeds;
use crate::setup::Ready;
use crate::stacks;
use crate::took::Took;
use crate::total::{How, Total};

mod jobs;
mod options;

pub(crate) use options::Options;

/// Factor by which a long run extends the time limit.
const LONG_FACTOR: u64 = 8;

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    if let Some(work) = options.work() {
        estimate::say(work, &workspace);
    }
    let mut took = Took::default();
    let here_only = options.repeat.is_some() || !options.package.is_empty();
    let record = options.record.as_ref();
    let start = |row: &Option<String>| Recorder::start(&workspace, row.as_deref());
    let mut recorder = record.map(start).transpose()?;
    let fetch = options.work().map(|_| Fetch::start(options.wanted()));
    let built = build(&workspace, options)?;
    drop(fetch);
    let rig = if here_only {
        Kind::Direct
    } else {
        choose(options.rig, &cargo::program_named(&built, "hvprobe")?)?
    };
    let ready = Ready::make(rig, options.kernel.as_ref())?;
    if let Some(recorder) = &mut recorder {
        recorder.with_guests(&ready, options.kernel.as_ref())?;
    }
    took.note("building");
    let seeds = Seeds::new(options.seed, options.long);
    progress::note(&seeds.to_string());
    let factor = if options.long { LONG_FACTOR } else { 1 };
    let mut time = options.machine.timeout(rig.time_limit() * factor);
    if !options.only_rig()
        && let Err(error) = stacks::ensure()
    {
        progress::note(&format!(
            "stacks of tests that hang cannot be shown: {error:#}"
        ));
    }
    if let Some(times) = options.repeat {
        let mut job = jobs::here(&ready, &built, options, seeds)?;
        // Leave out the examples in the documentation: they are built again each time, and have no threads.
        job.steps.retain(|step| step.program != CARGO);
        time = options.machine.timeout(rig.time_limit() * u64::from(times));
        job.timeout = time;
        return Ok(outcome::status(repeat::run(&job, &ready, times, seeds)?));
    }
    let deadline = Instant::now() + time;

    let mut total = Total::default();
    if !options.only_rig() {
        let mut job = jobs::here(&ready, &built, options, seeds)?;
        if let Some(rig) = options.rig.or((!here_only).then_some(rig)) {
            job.environment.extend(jobs::own_rig(&ready, &built, rig)?);
        }
        let how = options.how_here(deadline);
        run_job(&mut total, job, &ready, &how, recorder.as_mut())?;
        took.note("the tests here");
    }
    if !total.is_over() && !here_only {
        let left = match options.ci {
            true => groups::left_in_rig(&total.skipped),
            false => Vec::new(),
        };
        let job = jobs::in_rig(&ready, &built, rig, options, seeds, &left)?;
        let how = options.how(rig, deadline);
        run_job(&mut total, job, &ready, &how, recorder.as_mut())?;
        took.note("the tests in the rig");
    }
    took.print();
    let mut status = total.close();
    if total.ran_nothing() && !options.filter.is_empty() {
        progress::note("no test has that in its name (--filter)");
        status = ExitCode::FAILURE;
    }
    if status != ExitCode::SUCCESS {
        progress::note(&seeds.to_string());
    }
    if let Some(recorder) = recorder {
        recorder.write()?;
    }
    Ok(status)
}

/// Runs a job. Records its results if there is a `recorder`, unless the job was cut short.
fn run_job(
    total: &mut Total,
    job: Job,
    ready: &Ready,
    how: &How,
    recorder: Option<&mut Recorder>,
) -> Result<()> {
    let Some(recorder) = recorder else {
        return total.run(job, ready, how).map(drop);
    };
    let cells = recorder.cells(&job, how.rig)?;
    let results = total.run(job, ready, how)?;
    match total.is_over() {
        true => progress::note("not recorded: tests that were cut short"),
        false => recorder.see(cells, &results),
    }
    Ok(())
}

/// Builds the tests, and the programs that they need.
fn build(workspace: &Workspace, options: &Options) -> Result<Vec<Executable>> {
    if options.package.is_empty() {
        return workspace.build(&cargo::EVERYTHING);
    }
    workspace.build_packages(&options.package)
}

/// Runs the end-to-end tests among `built` with the guest of `ready`, as part of a larger run. Records the results
/// if there is a `recorder`. Returns the name of each test with that of its step, and the results.
pub(crate) fn of_rig(
    ready: &Ready,
    built: &[Executable],
    rig: Kind,
    options: &Options,
    recorder: Option<&mut Recorder>,
) -> Result<(Vec<(String, String)>, Total)> {
    let seeds = Seeds::new(options.seed, options.long);
    let job = jobs::in_rig(ready, built, rig, options, seeds, &[])?;
    let mut tests = Vec::new();
    for step in &job.steps {
        let group = step.group.iter().flat_map(|group| &group.tests);
        tests.extend(group.map(|test| (step.name(), test.clone())));
    }
    let deadline = Instant::now() + options.machine.timeout(rig.time_limit());
    let mut total = Total::default();
    let how = options.how(rig, deadline);
    run_job(&mut total, job, ready, &how, recorder)?;
    Ok((tests, total))
}
