//! Reasons why a probepoint keeps its int3.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{BuildError, Unfit};
use hvprobe_linux::image::Forbidden;
use hvprobe_spec::ProbeId;

use crate::code::error::HiddenError;

/// Why a probepoint keeps its int3.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unoptimized {
    /// The global switch is off.
    #[error("optimization is turned off")]
    Off,
    /// The engine watches this function, and handles the hit itself.
    #[error("the engine watches this function")]
    Internal,
    /// An action at the hit needs an exit.
    #[error("probe {probe} {what}")]
    Synchronous {
        /// The probe.
        probe: ProbeId,
        /// The action that needs the exit.
        what: &'static str,
    },
    /// Another probe is under the jump.
    #[error("there is another probe at {at}, under the jump")]
    Neighbour {
        /// Address of the other probe.
        at: Gva,
    },
    /// The instructions cannot be displaced by a jump.
    #[error(transparent)]
    Instructions(#[from] Unfit),
    /// The kernel patches bytes under the jump itself.
    #[error("{at}, under the jump: {why}")]
    Forbidden {
        /// Address of the first of these bytes.
        at: Gva,
        /// The reason.
        why: Forbidden,
    },
    /// An instruction under the jump has an exception-table entry: it may fault, and must do so at its own
    /// address.
    #[error("the instruction at {at}, under the jump, has an exception-table entry")]
    Fixup {
        /// Address of the instruction.
        at: Gva,
    },
    /// Control flow enters between the instructions under the jump.
    #[error("{from} leads into the bytes under the jump")]
    Landing {
        /// What leads there, in words: for example, a jump label of the module.
        from: &'static str,
    },
    /// A task may have been interrupted between the instructions under the jump.
    #[error("a task may stand between the instructions under the jump")]
    Interrupted,
    /// As `Interrupted`, but the guest has too much memory to prove by a scan that there is no such task.
    #[error(
        "a task may stand between the instructions under the jump, and the guest has too much memory \
         to look through"
    )]
    Unscannable,
    /// The guest has a kprobe of its own there, armed or not.
    #[error("the guest has a kprobe of its own at {at}, which a jump would come in the way of")]
    Kprobe {
        /// Address of the guest's kprobe.
        at: Gva,
    },
    /// The guest has an int3 or a jump of its own in the function, which may hide a branch.
    #[error(
        "what the guest's own patch at {at} hides is not known, and may lead into the bytes under the jump"
    )]
    Hidden {
        /// Address of the guest's patch.
        at: Gva,
    },
    /// The guest is changing its kprobes, and may be adding one there.
    #[error("the guest is changing its own kprobes")]
    KprobesChange,
    /// The guest's kprobes cannot be found, so there may be one anywhere.
    #[error("the kernel's own kprobes cannot be found, which a jump could come in the way of")]
    HiddenKprobes,
    /// The per-CPU locations of the processor number and the current task are not known.
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
    /// Returns whether the reason may pass soon without a change of ours.
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
