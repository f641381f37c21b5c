//! Options of `cargo lab test`, and what they mean for a run.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use clap::Args;

use crate::estimate::Work;
use crate::job::Input;
use crate::kernel::Choice;
use crate::kind::Kind;
use crate::prefetch::Wanted;
use crate::process;
use crate::run::MachineOptions;
use crate::total::How;

/// Kernel on which `--ci` runs the tests that hold on every kernel: the one that differs most from the kernel of
/// the other tests.
pub(super) const CI_KERNEL: &str = "7.2-cloud";

/// Number of test programs that run on this machine at a time. One program alone would leave processors idle while
/// it waits, or while only one of its threads works.
const PROGRAMS: usize = 2;

/// Which tests to run, and where.
#[derive(Args, Clone, Debug)]
#[command(override_usage = "cargo lab test [OPTIONS] [-- FILTER AND OTHER TEST ARGUMENTS...]")]
pub(crate) struct Options {
    /// Machine for the end-to-end tests [default: direct if its KVM can run Linux guests, else tcg]
    #[arg(long, value_enum)]
    pub(super) rig: Option<Kind>,
    #[command(flatten)]
    pub(super) machine: MachineOptions,
    /// Run only the end-to-end tests, in the rig
    #[arg(long)]
    rig_only: bool,
    /// Run only the end-to-end tests, in guests with this kernel: a name such as 6.12-cloud, or a file
    ///
    /// Names of Debian kernels are 5.10-cloud, 6.1, 6.1-rt, 6.1-cloud, 6.12-cloud, 6.12-rt, 7.2-cloud and 7.2-rt.
    /// The lab builds the kernel 6.1-stripped itself. Without --filter, tests whose results do not depend on the
    /// kernel are left out: those of servers, of the command line, and of synthetic kernels.
    #[arg(long, value_name = "NAME|FILE", value_parser = Choice::parse, conflicts_with_all = ["package", "repeat"])]
    pub(super) kernel: Option<Choice>,
    /// Maximum number of retries of a failed test, in fresh rigs [default: 4 in an emulated rig, else 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=10))]
    retries: Option<u32>,
    /// Time without output after which a rig is ended as hung [default: tcg 120, bochs 1800, direct no limit]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    silence: Option<u64>,
    /// Time limit of each test on this machine, after which it fails and its stacks are shown [default: 300, with
    /// --long 7200]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(60..=86400))]
    pub(super) limit: Option<u64>,
    /// Number of emulated machines that run in parallel [default: tcg 2 if there are two processors, else 1]
    ///
    /// Tests that fail there, and tests that depend on time, run afterwards in a machine that runs alone.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    rigs: Option<u32>,
    /// Run only tests whose name, or whose file's name, contains TEXT; repeatable
    #[arg(long, value_name = "TEXT")]
    pub(super) filter: Vec<OsString>,
    /// Build and run only the tests of this package, on this machine; repeatable
    #[arg(long, short, value_name = "NAME", conflicts_with = "rig_only")]
    pub(super) package: Vec<String>,
    /// Repeat the tests on this machine until one fails, at most N times, under CPU load and with a new seed each
    /// time
    #[arg(long, value_name = "N", conflicts_with = "rig_only", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) repeat: Option<u32>,
    /// Do not download gRPC for Python and Node, and skip the tests that need it
    #[arg(long)]
    pub(super) without_clients: bool,
    /// Run the checks that a change must pass, in a shortened form
    ///
    /// Besides the tests, runs the short forms of the benchmarks that need no guest, and the tests that must pass
    /// on every kernel, on 7.2-cloud. Tests with many rounds run a quarter of them, and property tests half of
    /// their cases. In an emulated rig, long tests are left to `cargo lab nightly`.
    #[arg(long, conflicts_with_all = ["package", "repeat", "rig_only", "kernel", "filter"])]
    pub(super) ci: bool,
    /// Run property tests with 50,000 cases (a quarter of that for streams of events), and decoders with 100,000
    /// mutations of each input; takes hours
    #[arg(long)]
    pub(super) long: bool,
    /// Use the seed that an earlier run printed, to repeat its random inputs
    #[arg(long, value_name = "NUMBER")]
    pub(super) seed: Option<u64>,
    /// Record the results in docs/hosts.md, by group of tests or together as ROW; refused if the tree has changes
    ///
    /// Without ROW, only groups of which all tests ran are recorded.
    #[arg(long, value_name = "ROW", num_args = 0..=1, require_equals = true, conflicts_with_all = ["ci", "repeat"])]
    pub(super) record: Option<Option<String>>,
    /// Print all output of tests as it arrives, not only that of failed tests
    #[arg(long, short)]
    verbose: bool,
    /// File that the tests read.
    #[arg(skip)]
    pub(super) input: Option<Input>,
    /// Arguments for every test program: a filter, --exact, --skip NAME, --ignored, ...
    #[arg(last = true)]
    pub(super) arguments: Vec<OsString>,
}

impl Options {
    /// Returns the options that run only the tests of `module`, in a rig. For other commands that run tests.
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
            record: None,
            verbose: false,
            input: None,
            arguments: Vec::new(),
        }
    }

    /// Returns the options with `input` for the tests, and with `--verbose`.
    pub(crate) fn with_input(self, input: Input) -> Self {
        Self {
            verbose: true,
            input: Some(input),
            ..self
        }
    }

    /// Returns whether the run tests another kernel as a whole. Such a run leaves out the tests whose results do
    /// not depend on the guest's kernel.
    pub(super) fn is_of_kernel(&self) -> bool {
        self.kernel.is_some() && self.filter.is_empty() && self.arguments.is_empty()
    }

    /// Returns what to fetch while the tests are built.
    pub(super) fn wanted(&self) -> Wanted {
        Wanted {
            kernels: if self.ci { vec![CI_KERNEL] } else { Vec::new() },
            clients: !self.without_clients && !self.only_rig(),
        }
    }

    /// Returns the estimate of the work; `None` for a selection of tests, for long or repeated runs, and if a rig
    /// is given.
    pub(super) fn work(&self) -> Option<Work> {
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

    pub(super) fn only_rig(&self) -> bool {
        self.rig_only || self.kernel.is_some()
    }

    /// Returns how a job is run in `rig`.
    pub(super) fn how(&self, rig: Kind, deadline: Instant) -> How {
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
    pub(super) fn how_here(&self, deadline: Instant) -> How {
        let how = self.how(Kind::Direct, deadline);
        How {
            rigs: if self.verbose { 1 } else { PROGRAMS },
            ..how
        }
    }
}
