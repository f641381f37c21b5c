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

/// Number of test programs that run on this machine at a time. One program alone would leave processors idle when
/// it waits, or has one thread that works.
const PROGRAMS: usize = 2;

/// Which tests to run, and where.
#[derive(Args, Clone, Debug)]
#[command(override_usage = "cargo lab test [OPTIONS] [-- FILTER AND OTHER TEST ARGUMENTS...]")]
pub(crate) struct Options {
    /// The machine for end-to-end tests [default: direct if its KVM can run Linux guests, else
    /// tcg]
    #[arg(long, value_enum)]
    pub(super) rig: Option<Kind>,
    #[command(flatten)]
    pub(super) machine: MachineOptions,
    /// Run only the tests that belong in the rig
    #[arg(long)]
    rig_only: bool,
    /// Run only the tests that belong in the rig, in guests with another kernel: 5.10-cloud, 6.1,
    /// 6.1-rt, 6.1-cloud, 6.12-cloud, 6.12-rt, 7.2-cloud or 7.2-rt, which are Debian's, 6.1-stripped, which is
    /// built, or a file. Without --filter, those are left out that ask nothing of it: of servers, of the command
    /// line, and of kernels that are made up
    #[arg(long, value_name = "NAME|FILE", value_parser = Choice::parse, conflicts_with_all = ["package", "repeat"])]
    pub(super) kernel: Option<Choice>,
    /// Run what failed again, so often at most, in a fresh rig [default: 4 in an emulated rig, else
    /// 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=10))]
    retries: Option<u32>,
    /// End a rig that prints nothing for this many seconds [default: tcg 120, bochs 1800, else never]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    silence: Option<u64>,
    /// End a test on this machine after this many seconds, and show its stacks
    /// [default: 300, of a long run 7200]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(60..=86400))]
    pub(super) limit: Option<u64>,
    /// How many emulated machines run at a time; what fails there, or needs all of this machine, runs in
    /// one alone afterwards [default: tcg 2, if this machine has as many processors, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    rigs: Option<u32>,
    /// Only tests with TEXT in their names, or in that of their file; as often as wanted
    #[arg(long, value_name = "TEXT")]
    pub(super) filter: Vec<OsString>,
    /// Build and run only the tests of this package, on this machine; as often as wanted
    #[arg(long, short, value_name = "NAME", conflicts_with = "rig_only")]
    pub(super) package: Vec<String>,
    /// Repeat the tests of this machine up to N times, each time with another seed, until one fails.
    /// Meanwhile another load keeps the processors busy
    #[arg(long, value_name = "N", conflicts_with = "rig_only", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) repeat: Option<u32>,
    /// Go without Python's and Node's gRPC, as without network: the tests that need them are skipped
    #[arg(long)]
    pub(super) without_clients: bool,
    /// Run what a change has to pass: beside the tests, the short forms of the benches that need no guest, and
    /// what holds on every kernel on the one that differs most. Tests that go many rounds go a quarter of
    /// them, properties have half of their cases, and in an emulated rig long tests are left to `nightly`
    #[arg(long, conflicts_with_all = ["package", "repeat", "rig_only", "kernel", "filter"])]
    pub(super) ci: bool,
    /// Give every property 50,000 cases (those about streams of events a quarter), and every decoder
    /// 100,000 mutations of each input: hours
    #[arg(long)]
    pub(super) long: bool,
    /// Make the same random inputs as a run that printed this number
    #[arg(long, value_name = "NUMBER")]
    pub(super) seed: Option<u64>,
    /// Write what passed, failed and was skipped into the table of docs/hosts.md, for each group of tests of which
    /// all were run; with ROW, for all of them together, in the row of that name. Refused if the tree has changes
    #[arg(long, value_name = "ROW", num_args = 0..=1, require_equals = true, conflicts_with_all = ["ci", "repeat"])]
    pub(super) record: Option<Option<String>>,
    /// Show everything tests print as they print it, not only what failed ones did
    #[arg(long, short)]
    verbose: bool,
    /// A file that the tests read
    #[arg(skip)]
    pub(super) input: Option<Input>,
    /// Passed to every test program: a filter, --exact, --skip NAME, --ignored, ...
    #[arg(last = true)]
    pub(super) arguments: Vec<OsString>,
}

impl Options {
    /// Returns the options for running only the tests of `module`, in a rig. For commands that do so with several
    /// kernels.
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

    /// Returns the estimate of the work, or `None` if not all tests are to run.
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
