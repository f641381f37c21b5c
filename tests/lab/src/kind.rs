//! The kinds of machines on which hvprobe runs: two emulated ones, and this machine.

use std::time::Duration;

use clap::ValueEnum;

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

    /// Returns how long a rig that runs tests may print nothing before it counts as hung. On this machine only the
    /// program can hang, and the time limit ends that.
    pub(crate) fn silence(self) -> Option<Duration> {
        match self {
            // Longer than the 80 s after which a test stops waiting for its guest, because the test's error says
            // more than that of this limit.
            Self::Tcg => Some(Duration::from_secs(120)),
            // Here the same work takes ten times as long.
            Self::Bochs => Some(Duration::from_secs(1800)),
            Self::Direct => None,
        }
    }

    /// Returns the time limit for all tests or a benchmark, in seconds.
    pub(crate) fn time_limit(self) -> u64 {
        match self {
            // Half of this time is for retries in fresh machines.
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

    /// Returns how often a failure is run again by default. About one guest in a hundred dies or hangs because of
    /// its emulated processor, and one in fifty where many virtual CPUs share the machine's processors. Sometimes
    /// the whole machine dies or hangs, up to six times in one run of all tests.
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
}
