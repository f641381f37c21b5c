//! Jobs: which programs and tests are their steps, on this machine and in a rig.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::options::{CI_KERNEL, Options};
use crate::cargo::{self, Executable};
use crate::clients;
use crate::groups;
use crate::job::{CARGO, Group, Job, LAB, Step};
use crate::kind::Kind;
use crate::libtest;
use crate::process;
use crate::progress;
use crate::retry::{self, SHOW};
use crate::run;
use crate::seeds::Seeds;
use crate::setup::Ready;

/// Commands of the lab that `--ci` runs besides the tests, each as a step: the tests that must pass on every
/// kernel, on one other kernel, and the short forms of the benches that need no guest. The short forms run all of
/// their code once, and check that their tables have the headings in docs/performance.md.
const CI: [&[&str]; 3] = [
    &["matrix", "--kernel", CI_KERNEL],
    &["bench", "events", "--smoke"],
    &["bench", "batch", "--smoke"],
];

/// Test programs that take longest on this machine.
const LONGEST: [&str; 9] = [
    "detour",
    "foreign_hits",
    "hvprobe_engine",
    "hvprobe_server",
    "logs",
    "loom_calls",
    "micro_differential",
    "server",
    "slow_client",
];

/// Returns whether a step on this machine is short. Short steps begin last, so that no processor is idle at the
/// end.
fn is_short(step: &Step) -> bool {
    let name = step.program.rsplit_once('-').map_or("", |(name, _)| name);
    step.package.is_some() && step.program != CARGO && !LONGEST.contains(&name)
}

/// Time limit of a test on this machine, in seconds. It is enough, on a busy machine, for a test that takes a
/// minute when it runs alone.
const LIMIT: u64 = 300;
/// Time limit of a test in a long run, in seconds. In a long run, properties have two hundred times as many cases.
const LONG_LIMIT: u64 = 7200;

/// Makes the job for this machine: everything but the tests that only a rig can run.
pub(super) fn here(
    ready: &Ready,
    built: &[Executable],
    options: &Options,
    seeds: Seeds,
) -> Result<Job> {
    let mut job = new_job(built, options);
    if options.ci {
        // These steps take longest, so they begin first.
        let lab = cargo::program_named(built, LAB)?;
        job.programs.push((LAB.to_owned(), lab));
        job.steps
            .extend(CI.iter().map(|words| Step::new(LAB, *words)));
    }
    for test in built.iter().filter(|executable| executable.test) {
        if !is_end_to_end(ready, test) || test.name.starts_with("micro_") {
            add(&mut job, test, options);
        }
    }
    if options.package.is_empty() {
        // With the same features as in the build of everything, no crate is built again.
        let mut arguments: Vec<OsString> = [
            "test",
            "--quiet",
            "--workspace",
            "--doc",
            cargo::FEATURES,
            "--",
        ]
        .map(Into::into)
        .to_vec();
        arguments.extend(for_tests(options));
        job.programs
            .push((CARGO.to_owned(), PathBuf::from(cargo::program())));
        job.steps.push(Step {
            package: Some(ready.workspace.root.clone()),
            ..Step::new(CARGO, arguments)
        });
    }
    job.steps.sort_by_key(is_short);
    if options.without_clients {
        progress::note("tests with gRPC of Python and Node are skipped (--without-clients)");
    } else {
        job.environment = clients::environment(&ready.cache)?;
    }
    let kernel = ready.guest.kernel();
    job.environment.push((VMLINUZ.to_owned(), kernel.into()));
    // With a single thread, libtest would print other lines about the tests. So use at least two.
    if std::env::var_os(THREADS).is_none() {
        let threads = process::processors().max(2).to_string();
        job.environment.push((THREADS.to_owned(), threads.into()));
    }
    if options.repeat.is_none() {
        job.environment.extend(seeds.environment());
    }
    if options.ci {
        job.environment.push((run::SHORT.to_owned(), "1".into()));
        // Half of proptest's default. Each run has another seed, and `cargo lab nightly` runs the properties with
        // all cases.
        job.environment
            .push(("PROPTEST_CASES".to_owned(), "128".into()));
    }
    Ok(job)
}

/// Returns the variables for those tests on this machine that start a rig themselves.
pub(super) fn own_rig(
    ready: &Ready,
    built: &[Executable],
    rig: Kind,
) -> Result<Vec<(String, OsString)>> {
    let (kernel, initrd) = match rig {
        Kind::Direct => (ready.guest.kernel(), ready.guest.initrd()),
        Kind::Tcg => ("/guest/kernel".into(), "/guest/initrd.cpio".into()),
        // No port can be forwarded into Bochs.
        Kind::Bochs => return Ok(Vec::new()),
    };
    let variables: [(&str, OsString); 4] = [
        // The lab that was built with the tests. That build may replace the lab that is running.
        (
            "HVPROBE_TEST_LAB",
            cargo::program_named(built, "lab")?.into(),
        ),
        ("HVPROBE_TEST_RIG", rig.name().into()),
        ("HVPROBE_TEST_KERNEL", kernel.into()),
        ("HVPROBE_TEST_INITRD", initrd.into()),
    ];
    Ok(variables
        .map(|(name, value)| (name.to_owned(), value))
        .into())
}

/// Makes the job of the end-to-end tests for `rig`. If the rig is this machine, leaves out the tests that have
/// already run here. Also leaves out the programs in `left`, which are left to `cargo lab nightly`.
pub(super) fn in_rig(
    ready: &Ready,
    built: &[Executable],
    rig: Kind,
    options: &Options,
    seeds: Seeds,
    left: &[&str],
) -> Result<Job> {
    let mut job = new_job(built, options);
    for test in built.iter().filter(|executable| executable.test) {
        let ran_here = rig == Kind::Direct && test.name.starts_with("micro_");
        let is_left = options.is_of_kernel() && !groups::asks_the_kernel(&test.name);
        if is_end_to_end(ready, test) && !ran_here && !is_left {
            if left.contains(&test.name.as_str()) {
                progress::note(&format!(
                    "left to `cargo lab nightly` in the rig: {}",
                    test.name
                ));
                continue;
            }
            add(&mut job, test, options);
            // On this machine a program runs as a whole, unless the results of each group are to be recorded.
            if (rig.is_emulated() || options.record.is_some())
                && let Some(whole) = job.steps.pop()
            {
                let left = (options.ci, options.is_of_kernel());
                job.steps.extend(by_group(&test.path, &whole, left)?);
            }
        }
    }
    let kernel = match rig {
        Kind::Direct => ready.guest.kernel(),
        Kind::Tcg | Kind::Bochs => PathBuf::from("/guest/kernel"),
    };
    job.environment = run::environment(rig);
    job.environment.extend([
        (VMLINUZ.to_owned(), kernel.into()),
        // Run one test at a time.
        (THREADS.to_owned(), "1".into()),
    ]);
    job.environment.extend(seeds.environment());
    if options.ci {
        job.environment.push((run::SHORT.to_owned(), "1".into()));
    }
    if let Some(input) = &options.input {
        job.give(input, rig);
    }
    Ok(job)
}

/// Returns a step for each group of the tests that `whole`, a step of the program at `path`, would run. If `ci`,
/// leaves out the tests that are left to `cargo lab nightly`. If `of_kernel`, leaves out the tests whose results do
/// not depend on the guest's kernel.
fn by_group(path: &Path, whole: &Step, (ci, of_kernel): (bool, bool)) -> Result<Vec<Step>> {
    let mut tests = libtest::list(path, &whole.arguments)?;
    if of_kernel {
        tests.retain(|test| groups::asks_the_kernel(test));
    }
    if ci {
        for left in groups::leave_to_the_night(&mut tests) {
            progress::note(&format!("left to `cargo lab nightly`: {left}"));
        }
    }
    let groups = groups::of(tests);
    let step = |group: Group| Step {
        arguments: retry::only(&whole.arguments, group.tests.iter().map(String::as_str)),
        group: Some(group),
        ..whole.clone()
    };
    Ok(groups.into_iter().map(step).collect())
}

/// Environment variable of libtest with the number of tests that run at a time.
const THREADS: &str = "RUST_TEST_THREADS";
/// Environment variable with the path of the guests' kernel image.
const VMLINUZ: &str = "HVPROBE_TEST_VMLINUZ";

fn new_job(built: &[Executable], options: &Options) -> Job {
    let mut job = Job::new(built, Duration::ZERO);
    options.machine.apply(&mut job);
    job.captured = true;
    let limit = if options.long { LONG_LIMIT } else { LIMIT };
    job.test_limit = Some(Duration::from_secs(options.limit.unwrap_or(limit)));
    job
}

/// Returns the arguments of every test program.
fn for_tests(options: &Options) -> impl Iterator<Item = OsString> {
    let filter = options.filter.iter().cloned();
    for_whole_program(options).chain(filter)
}

/// Returns the arguments of a test program that runs all of its tests.
fn for_whole_program(options: &Options) -> impl Iterator<Item = OsString> {
    std::iter::once(SHOW.into()).chain(options.arguments.iter().cloned())
}

/// Returns whether one of `filters` matches the program called `name`, and so selects all of its tests.
fn is_meant(filters: &[OsString], name: &str) -> bool {
    let mut filters = filters.iter().filter_map(|filter| filter.to_str());
    filters.any(|filter| name.contains(filter))
}

/// Returns whether `test` is `tests/tests/rig/` or one of `tests/tests/micro_*`.
fn is_end_to_end(ready: &Ready, test: &Executable) -> bool {
    test.package == ready.workspace.root.join("tests")
        && (test.name == "rig" || test.name.starts_with("micro_"))
}

/// Adds a test program under its file's name, which cargo makes unique.
fn add(job: &mut Job, test: &Executable, options: &Options) {
    let name = test
        .path
        .file_name()
        .map_or_else(|| test.name.clone(), |name| name.to_string_lossy().into());
    job.programs.push((name.clone(), test.path.clone()));
    let arguments: Vec<_> = match is_meant(&options.filter, &test.name) {
        true => for_whole_program(options).collect(),
        false => for_tests(options).collect(),
    };
    job.steps.push(Step {
        package: Some(test.package.clone()),
        ..Step::new(&name, arguments)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_means_all_tests_of_a_file_that_has_it_in_its_name() {
        let filters = ["micro_pause", "exact"].map(OsString::from);
        assert!(is_meant(&filters, "micro_pause"));
        assert!(!is_meant(&filters, "micro_pau") && !is_meant(&[], "micro_pause"));
    }

    /// The tests of this program stand in for those of a rig.
    #[test]
    fn each_module_of_a_program_is_a_step() {
        let whole = Step::new("lab-1", [SHOW, "each_module", "--skip", "other"]);
        let path = std::env::current_exe().unwrap();
        let steps = by_group(&path, &whole, (false, false)).unwrap();
        let [step] = &steps[..] else {
            panic!("{steps:?}")
        };
        let test = "test::jobs::tests::each_module_of_a_program_is_a_step";
        assert_eq!(step.arguments, [SHOW, "--exact", test]);
        assert_eq!(step.name(), "lab-1: test::");
    }
}
