//! Why a probepoint keeps its int3.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{BuildError, Unfit};
use hvprobe_linux::image::Forbidden;
use hvprobe_spec::ProbeId;

use crate::code::error::HiddenError;

/// Why a probepoint keeps its int3.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unoptimized {
    /// The global knob.
    #[error("optimization is turned off")]
    Off,
    /// The engine needs the hit itself.
    #[error("the engine watches this function")]
    Internal,
    /// Something is to happen at the hit that only an exit can do.
    #[error("probe {probe} {what}")]
    Synchronous {
        /// The probe.
        probe: ProbeId,
        /// What needs the exit.
        what: &'static str,
    },
    /// Another probe lies under the jump.
    #[error("there is another probe at {at}, under the jump")]
    Neighbour {
        /// Where.
        at: Gva,
    },
    /// The instructions do not allow it.
    #[error(transparent)]
    Instructions(#[from] Unfit),
    /// The kernel patches bytes under the jump itself.
    #[error("{at}, under the jump: {why}")]
    Forbidden {
        /// Where.
        at: Gva,
        /// The reason.
        why: Forbidden,
    },
    /// An instruction under the jump may fault and must be found in its place.
    #[error("the instruction at {at}, under the jump, has an exception-table entry")]
    Fixup {
        /// Where.
        at: Gva,
    },
    /// Something enters between the instructions under the jump.
    #[error("{from} leads into the bytes under the jump")]
    Landing {
        /// What.
        from: &'static str,
    },
    /// A task may have been interrupted between the instructions under the jump.
    #[error("a task may stand between the instructions under the jump")]
    Interrupted,
    /// The same, and the guest has too much memory to prove otherwise.
    #[error(
        "a task may stand between the instructions under the jump, and the guest has too much memory \
         to look through"
    )]
    Unscannable,
    /// The guest has a kprobe of its own there, armed or not.
    #[error("the guest has a kprobe of its own at {at}, which a jump would come in the way of")]
    Kprobe {
        /// Where.
        at: Gva,
    },
    /// The guest has an int3 or a jump of its own in the function, and what that hides may be a branch.
    #[error(
        "what the guest's own patch at {at} hides is not known, and may lead into the bytes under the jump"
    )]
    Hidden {
        /// Where.
        at: Gva,
    },
    /// The guest may have a kprobe there soon.
    #[error("the guest is changing its own kprobes")]
    KprobesChange,
    /// The guest may have kprobes of its own anywhere.
    #[error("the kernel's own kprobes cannot be found, which a jump could come in the way of")]
    HiddenKprobes,
    /// The guest's kernel does not tell where a processor's number and its task are.
    #[error("the kernel's per-CPU data cannot be found")]
    NoPerCpu,
    /// The detour cannot be made.
    #[error("no detour can be made: {0}")]
    Build(String),
    /// There is no room for the detour.
    #[error("there is no room for a detour")]
    NoRoom,
    /// The memory for detours cannot be mapped.
    #[error("the memory for detours cannot be mapped")]
    Memory(#[from] HiddenError),
}

impl Unoptimized {
    /// Whether it may be otherwise a moment later, with nothing changed here.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Interrupted | Self::Kprobe { .. } | Self::KprobesChange | Self::NoRoom
        )
    }
}

impl From<BuildError> for Unoptimized {
    fn from(error: BuildError) -> Self {
        Self::Build(error.to_string())
    }
}
