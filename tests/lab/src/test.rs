//! `cargo lab test`: every test of the workspace, on this machine and in a rig.
//!
//! Tests are built once. Those of `tests/tests/rig/` need KVM that can run Linux guests, and run in the rig
//! only; `tests/tests/micro_*.rs` run on any KVM, on this machine and in the rig; all others, and the examples
//! in the documentation, run on this machine. An emulated rig now and then fails for reasons of its own, so a
//! failure there is run again in a fresh one. The tests of a module are one process there, because they share
//! guests.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use crate::cargo::{self, Executable, Workspace};
use crate::choose::choose;
use crate::clients;
use crate::estimate::{self, Work};
use crate::groups;
use crate::job::{CARGO, Group, Input, Job, LAB, Step};
use crate::kernel::Choice;
use crate::kind::Kind;
use crate::libtest;
use crate::outcome;
use crate::prefetch::{Fetch, Wanted};
use crate::process;
use crate::progress;
use crate::repeat;
use crate::retry::{self, SHOW};
use crate::run::{self, MachineOptions};
use crate::seeds::Seeds;
use crate::setup::Ready;
use crate::stacks;
use crate::took::Took;
use crate::total::{How, Total};

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
    /// Run only the tests that belong in the rig, in guests with another kernel: 5.10-cloud, 6.1,
    /// 6.1-rt, 6.1-cloud, 6.12-cloud, 6.12-rt, 7.2-cloud or 7.2-rt, which are Debian's, 6.1-stripped, which is
    /// built, or a file. Without --filter, those are left out that ask nothing of it: of servers, of the command
    /// line, and of kernels that are made up
    #[arg(long, value_name = "NAME|FILE", value_parser = Choice::parse, conflicts_with_all = ["package", "repeat"])]
    kernel: Option<Choice>,
    /// Run what failed again, so often at most, in a fresh rig [default: 4 in an emulated rig, else
    /// 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=10))]
    retries: Option<u32>,
    /// End a rig that prints nothing for so many seconds [default: tcg 120, bochs 1800, else never]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    silence: Option<u64>,
    /// End a test on this machine that takes longer than so many seconds, and show its stacks
    /// [default: 300, of a long run 7200]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(60..=86400))]
    limit: Option<u64>,
    /// How many emulated machines run at a time; what fails there, or needs all of this machine, runs in
    /// one alone afterwards [default: tcg 2, if this machine has as many processors, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    rigs: Option<u32>,
    /// Only tests with TEXT in their names, or in that of their file; as often as wanted
    #[arg(long, value_name = "TEXT")]
    filter: Vec<OsString>,
    /// Build and run only the tests of this package, on this machine; as often as wanted
    #[arg(long, short, value_name = "NAME", conflicts_with = "rig_only")]
    package: Vec<String>,
    /// Run the tests of this machine so many times beside a load that takes the CPU, each time with
    /// another seed, until one fails
    #[arg(long, value_name = "N", conflicts_with = "rig_only", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: Option<u32>,
    /// Go without Python's and Node's gRPC, as without network: the tests that need them are skipped
    #[arg(long)]
    without_clients: bool,
    /// Run what a change has to pass: beside the tests, the short forms of the benches that need no guest, and
    /// what holds on every kernel on the one that differs most. Tests that go many rounds go a quarter of
    /// them, properties have half of their cases, and in an emulated rig long tests are left to `nightly`
    #[arg(long, conflicts_with_all = ["package", "repeat", "rig_only", "kernel", "filter"])]
    ci: bool,
    /// Give every property 50,000 cases (those about streams of events a quarter), and every decoder
    /// 100,000 mutations of each input: hours
    #[arg(long)]
    long: bool,
    /// Make the same random inputs as a run that printed this number
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Show everything tests print as they print it, not only what failed ones did
    #[arg(long, short)]
    verbose: bool,
    /// A file that the tests read
    #[arg(skip)]
    input: Option<Input>,
    /// Passed to every test program: a filter, --exact, --skip NAME, --ignored, ...
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

impl Options {
    /// Returns the options for a module's tests with one kernel among several.
    pub(crate) fn in_rig(machine: &MachineOptions, retries: Option<u32>, module: &str) -> Self {
        Self {
            rig: None,
            machine: machine.clone(),
            rig_only: true,
            kernel: None,
            retries,
            silence: None,
            rigs: None,
            limit: None,
            filter: vec![module.into()],
            package: Vec::new(),
            repeat: None,
            without_clients: false,
            ci: false,
            long: false,
            seed: None,
            verbose: false,
            input: None,
            arguments: Vec::new(),
        }
    }

    /// Gives the tests `input`, and shows their output as it is printed.
    pub(crate) fn with_input(self, input: Input) -> Self {
        Self {
            verbose: true,
            input: Some(input),
            ..self
        }
    }

    /// Returns whether the run is about another kernel as a whole. Such a run leaves out the tests that ask
    /// nothing of the guest's kernel.
    fn is_of_kernel(&self) -> bool {
        self.kernel.is_some() && self.filter.is_empty() && self.arguments.is_empty()
    }

    /// Returns what to fetch while the tests are built.
    fn wanted(&self) -> Wanted {
        Wanted {
            kernels: if self.ci { vec![CI_KERNEL] } else { Vec::new() },
            clients: !self.without_clients && !self.only_rig(),
        }
    }

    /// Returns the estimate of the work, if all tests are run.
    fn work(&self) -> Option<Work> {
        let is_whole = self.package.is_empty()
            && self.filter.is_empty()
            && self.arguments.is_empty()
            && self.repeat.is_none()
            && !self.long
            && self.rig.is_none();
        let rest = match (self.ci, self.only_rig()) {
            (true, _) => 560,
            (false, true) => 800,
            (false, false) => 1080,
        };
        is_whole.then_some(Work {
            build: Duration::from_secs(300),
            rest: Duration::from_secs(rest),
        })
    }

    fn only_rig(&self) -> bool {
        self.rig_only || self.kernel.is_some()
    }

    /// Returns how a job is run in `rig`.
    fn how(&self, rig: Kind, deadline: Instant) -> How {
        let rigs = self.rigs.and_then(|rigs| usize::try_from(rigs).ok());
        How {
            rig,
            rigs: rigs.unwrap_or(rig.at_a_time().min(process::processors())),
            deadline,
            retries: self.retries.unwrap_or(rig.retries()),
            silence: self.silence.map(Duration::from_secs).or(rig.silence()),
            verbose: self.verbose,
        }
    }

    /// Returns how a job is run on this machine. With `verbose`, one program runs at a time, because its output
    /// is shown as it is printed.
    fn how_here(&self, deadline: Instant) -> How {
        let how = self.how(Kind::Direct, deadline);
        How {
            rigs: if self.verbose { 1 } else { PROGRAMS },
            ..how
        }
    }
}

/// What `--ci` runs besides the tests, each as a step of its own: the tests of every kernel, on the kernel that
/// differs most from that of the other tests; and the benches that need no guest. These go through all of their
/// code once, and print the tables that docs/performance.md shows.
const CI: [&[&str]; 3] = [
    &["matrix", "--kernel", CI_KERNEL],
    &["bench", "events", "--smoke"],
    &["bench", "batch", "--smoke"],
];
const CI_KERNEL: &str = "7.2-cloud";

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

/// Returns whether a step on this machine ends soon. Such steps begin last, so that no processor is idle in the
/// end.
fn is_short(step: &Step) -> bool {
    let name = step.program.rsplit_once('-').map_or("", |(name, _)| name);
    step.package.is_some() && step.program != CARGO && !LONGEST.contains(&name)
}

/// Number of test programs that run on this machine at a time: a program that waits, or keeps one processor
/// busy, leaves room for another.
const PROGRAMS: usize = 2;

/// Time limits of a test on this machine, in seconds. [`LIMIT`] is for a test that takes a minute alone, on a
/// busy machine; [`LONG_LIMIT`] for one with two hundred times as many cases.
const LIMIT: u64 = 300;
const LONG_LIMIT: u64 = 7200;
/// Factor for the time limit of a long run.
const LONG_FACTOR: u64 = 8;

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    if let Some(work) = options.work() {
        estimate::say(work, &workspace);
    }
    let mut took = Took::default();
    let here_only = options.repeat.is_some() || !options.package.is_empty();
    let fetch = options.work().map(|_| Fetch::start(options.wanted()));
    let built = build(&workspace, options)?;
    drop(fetch);
    let rig = if here_only {
        Kind::Direct
    } else {
        choose(options.rig, &cargo::program_named(&built, "hvprobe")?)?
    };
    let ready = Ready::make(rig, options.kernel.as_ref())?;
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
        let mut job = job_here(&ready, &built, options, seeds)?;
        // The examples in the documentation are built anew each time, and have no threads.
        job.steps.retain(|step| step.program != CARGO);
        time = options.machine.timeout(rig.time_limit() * u64::from(times));
        job.timeout = time;
        return Ok(outcome::status(repeat::run(&job, &ready, times, seeds)?));
    }
    let deadline = Instant::now() + time;

    let mut total = Total::default();
    if !options.only_rig() {
        let mut job = job_here(&ready, &built, options, seeds)?;
        if let Some(rig) = options.rig.or((!here_only).then_some(rig)) {
            job.environment.extend(own_rig(&ready, &built, rig)?);
        }
        total.run(job, &ready, &options.how_here(deadline))?;
        took.note("the tests here");
    }
    if !total.is_over() && !here_only {
        let left = match options.ci {
            true => groups::left_in_rig(&total.skipped),
            false => Vec::new(),
        };
        let job = job_in_rig(&ready, &built, rig, options, seeds, &left)?;
        total.run(job, &ready, &options.how(rig, deadline))?;
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
    Ok(status)
}

/// Builds the tests, and the programs they need.
fn build(workspace: &Workspace, options: &Options) -> Result<Vec<Executable>> {
    if options.package.is_empty() {
        return workspace.build(&cargo::EVERYTHING);
    }
    workspace.build_packages(&options.package)
}

/// Runs the end-to-end tests among `built` with the guest of `ready`, as part of a larger run. Returns the name
/// of each test with that of its step, and the results.
pub(crate) fn of_rig(
    ready: &Ready,
    built: &[Executable],
    rig: Kind,
    options: &Options,
) -> Result<(Vec<(String, String)>, Total)> {
    let seeds = Seeds::new(options.seed, options.long);
    let job = job_in_rig(ready, built, rig, options, seeds, &[])?;
    let mut tests = Vec::new();
    for step in &job.steps {
        let group = step.group.iter().flat_map(|group| &group.tests);
        tests.extend(group.map(|test| (step.name(), test.clone())));
    }
    let deadline = Instant::now() + options.machine.timeout(rig.time_limit());
    let mut total = Total::default();
    total.run(job, ready, &options.how(rig, deadline))?;
    Ok((tests, total))
}

/// Makes the job for this machine: everything but the tests that only a rig can run.
fn job_here(ready: &Ready, built: &[Executable], options: &Options, seeds: Seeds) -> Result<Job> {
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
        // With the features of the whole build, nothing is built again.
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
    // With a single thread libtest runs tests one by one, and prints other lines about them.
    if std::env::var_os(THREADS).is_none() {
        let threads = process::processors().max(2).to_string();
        job.environment.push((THREADS.to_owned(), threads.into()));
    }
    if options.repeat.is_none() {
        job.environment.extend(seeds.environment());
    }
    if options.ci {
        job.environment.push((run::SHORT.to_owned(), "1".into()));
        // Half of proptest's default. Each run has another seed, and the night tries all cases several times.
        job.environment
            .push(("PROPTEST_CASES".to_owned(), "128".into()));
    }
    Ok(job)
}

/// Returns the variables for tests on this machine that start a rig of their own.
fn own_rig(ready: &Ready, built: &[Executable], rig: Kind) -> Result<Vec<(String, OsString)>> {
    let (kernel, initrd) = match rig {
        Kind::Direct => (ready.guest.kernel(), ready.guest.initrd()),
        Kind::Tcg => ("/guest/kernel".into(), "/guest/initrd.cpio".into()),
        // No port leads into it.
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

/// Makes the job of the end-to-end tests, without those that ran on this machine already if it is the rig, and
/// without the programs that are `left` to the night.
fn job_in_rig(
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
            if rig.is_emulated()
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
        // Each test has the machine for itself.
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

/// Makes a step for each group of the tests that `whole` would run of the program at `path`. Leaves out the
/// tests for the night if `ci`, and those that ask nothing of the kernel if `of_kernel`.
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

/// libtest's variable for the number of tests that run at a time.
const THREADS: &str = "RUST_TEST_THREADS";
/// Variable for the path of the guests' kernel image.
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

/// Returns whether one of `filters` selects all tests of the program called `name`.
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
        let test = "test::tests::each_module_of_a_program_is_a_step";
        assert_eq!(step.arguments, [SHOW, "--exact", test]);
        assert_eq!(step.name(), "lab-1: test::");
    }
}
