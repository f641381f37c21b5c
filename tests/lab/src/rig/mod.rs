//! The machines that hvprobe runs on: two emulated ones, and this one.

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
    /// Returns the Debian packages that the rig needs; every kind needs busybox for the guest image.
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

    /// Returns the rig's name on the command line and in `HVPROBE_RIG`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Bochs => "bochs",
            Self::Direct => "direct",
        }
    }

    /// Returns how long a rig that runs tests may print nothing before it counts as hung. On this machine
    /// itself only a program of ours can hang, which the time limit ends.
    pub(crate) fn silence(self) -> Option<Duration> {
        match self {
            // A test that waits for its guest gives up after 80 s, and its error says more than this limit's.
            Self::Tcg => Some(Duration::from_secs(120)),
            // The same work takes ten times as long.
            Self::Bochs => Some(Duration::from_secs(1800)),
            Self::Direct => None,
        }
    }

    /// The time limit for all tests or a benchmark, in seconds.
    pub(crate) fn time_limit(self) -> u64 {
        match self {
            // Half of it is for fresh machines and what runs again there.
            Self::Tcg => 2700,
            Self::Direct => 1800,
            Self::Bochs => 7200,
        }
    }

    /// Returns whether the rig's processor is software.
    pub(crate) fn is_emulated(self) -> bool {
        self != Self::Direct
    }

    /// Returns whether a tick of the time stamp counter is an instruction of the processor, not time: Bochs
    /// derives the time of its machine from the instructions that it has executed.
    pub(crate) fn ticks_are_instructions(self) -> bool {
        self == Self::Bochs
    }

    /// Returns how often a failure is run again by default. About one guest in a hundred dies or hangs because
    /// of its emulated processor, one in fifty where many virtual CPUs share the machine's processors; the
    /// whole machine does now and then, up to six times in one run of all tests.
    pub(crate) fn retries(self) -> u32 {
        match self {
            Self::Tcg | Self::Bochs => 4,
            Self::Direct => 0,
        }
    }

    /// Returns how many rigs of this kind run at a time, on a machine with enough processors.
    pub(crate) fn at_a_time(self) -> usize {
        match self {
            Self::Tcg => 2,
            // Bochs derives its time from its instructions, and there is only one of this machine.
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

/// Receives events of the steps as they run.
pub(crate) trait Listener {
    /// Step number `step` starts.
    fn begin(&mut self, _step: usize) {}
    /// The running step printed these bytes.
    fn output(&mut self, bytes: &[u8]) -> Result<()>;
    /// The step ended. A program ended by signal N has status 128 + N.
    fn end(&mut self, _step: usize, _status: u8) {}
}

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Exit status of each step; none if it did not end.
    pub(crate) statuses: Vec<Option<u8>>,
    pub(crate) finish: Finish,
    /// The serial log, if it was kept.
    pub(crate) log: Option<PathBuf>,
}

/// Whether a job ran to its end.
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

/// Returns the reason for ending a rig, or a program on this machine, that printed nothing for too long.
fn stood_still(who: &str, silence: Option<Duration>) -> String {
    let seconds = silence.unwrap_or_default().as_secs();
    format!("{who} stood still: nothing printed for {seconds} s")
}
