//! The machines hvprobe runs on: two emulated ones, and this one.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;

use crate::job::Job;
use crate::setup::Ready;

mod bochs;
mod console;
mod direct;
mod emulated;
mod tcg;

/// A kind of rig.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// QEMU's software emulation of an AMD machine with SVM (kvm_amd); boots in 3 s
    Tcg,
    /// Bochs' software emulation of an Intel machine with VMX (kvm_intel); boots in 1-2 minutes
    Bochs,
    /// No emulation: this machine and its /dev/kvm
    Direct,
}

impl Kind {
    /// The Debian packages it needs; every kind needs busybox for the guest image.
    pub(crate) fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Tcg => &["busybox-static", "qemu-system-x86"],
            Self::Bochs => &[
                "busybox-static",
                "bochs",
                "bochs-term",
                "bochsbios",
                "vgabios",
                "grub-pc-bin",
                "grub-common",
                "xorriso",
                "mtools",
            ],
            Self::Direct => &["busybox-static"],
        }
    }

    /// Its name on the command line and in `HVPROBE_RIG`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Bochs => "bochs",
            Self::Direct => "direct",
        }
    }

    /// How long a rig that runs tests may print nothing before it counts as standing still. On this
    /// machine itself nothing but a program of ours can stand still, which the time limit ends.
    pub(crate) fn silence(self) -> Option<Duration> {
        match self {
            // A test that waits for its guest gives up after 80 s, and tells more than this would.
            Self::Tcg => Some(Duration::from_secs(120)),
            // The same work takes ten times as long.
            Self::Bochs => Some(Duration::from_secs(1800)),
            Self::Direct => None,
        }
    }

    /// The time limit for all tests or a benchmark, in seconds.
    pub(crate) fn time_limit(self) -> u64 {
        match self {
            // Half of it for fresh machines and what runs again there.
            Self::Tcg => 2700,
            Self::Direct => 1800,
            Self::Bochs => 7200,
        }
    }

    /// Whether its processor is software.
    pub(crate) fn is_emulated(self) -> bool {
        self != Self::Direct
    }

    /// Whether a tick of the time stamp counter is an instruction of the processor, and no time: Bochs
    /// makes the time of its machine from the instructions it has carried out.
    pub(crate) fn ticks_are_instructions(self) -> bool {
        self == Self::Bochs
    }

    /// How often what failed is run again by default. About one guest in a hundred dies or hangs of
    /// its emulated processor, one in fifty where many virtual CPUs share the machine's, and the whole
    /// machine now and then: up to six times in one run of all tests.
    pub(crate) fn retries(self) -> u32 {
        match self {
            Self::Tcg | Self::Bochs => 4,
            Self::Direct => 0,
        }
    }

    /// How many of them run at a time, on a machine with enough processors.
    pub(crate) fn at_a_time(self) -> usize {
        match self {
            Self::Tcg => 2,
            // Its time is that of its instructions, and this machine is one.
            Self::Bochs | Self::Direct => 1,
        }
    }

    /// Boots the rig if it is an emulated one, runs the job's steps and ends it.
    pub(crate) fn run(
        self,
        ready: &Ready,
        job: &Job,
        listener: &mut dyn Listener,
    ) -> Result<Outcome> {
        match self {
            Self::Tcg => emulated::run(&tcg::Tcg, ready, job, listener),
            Self::Bochs => emulated::run(&bochs::Bochs, ready, job, listener),
            Self::Direct => direct::run(ready, job, listener),
        }
    }
}

/// Hears of the steps as they run.
pub(crate) trait Listener {
    /// Step number `step` starts.
    fn begin(&mut self, _step: usize) {}
    /// The running step printed this.
    fn output(&mut self, bytes: &[u8]) -> Result<()>;
    /// The step ended. A program ended by signal N has status 128 + N.
    fn end(&mut self, _step: usize, _status: u8) {}
}

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The exit status of each step; none if it did not come to its end.
    pub(crate) statuses: Vec<Option<u8>>,
    pub(crate) finish: Finish,
    /// The serial log, if it was kept.
    pub(crate) log: Option<PathBuf>,
}

/// Whether a job came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// All steps ran.
    Complete,
    /// The job's time was over.
    TimedOut,
    /// The lab received this signal, or the user left.
    Interrupted(i32),
    /// The rig ended before its steps, for this reason.
    Broken(String),
}

/// Why a rig, or a program on this machine, was ended that printed nothing for too long.
fn stood_still(who: &str, silence: Option<Duration>) -> String {
    let seconds = silence.unwrap_or_default().as_secs();
    format!("{who} stood still: nothing printed for {seconds} s")
}
