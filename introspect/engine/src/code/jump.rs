//! Jumps, and the facts about the guest that detours depend on.

use std::sync::Arc;

use hvprobe_arch::detour::{Detour, Readers, Ring, StackFields, TaskFields};
use hvprobe_spec::ProbeId;

/// Jump of a site.
#[derive(Clone, Debug)]
pub(crate) struct Jump {
    pub(crate) detour: Arc<Detour>,
    /// Probes that the detour records for, in the order of their registration.
    pub(crate) members: Vec<ProbeId>,
}

impl Jump {
    /// Returns the size of the detour in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.detour.code().len() as u64
    }
}

/// Facts about the guest that detours depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DetourContext {
    pub(crate) ring: Ring,
    /// Per-CPU location of the processor number; `None` if it is not known, which is possible only with one virtual
    /// CPU.
    pub(crate) cpu: Option<u32>,
    pub(crate) task: Option<TaskFields>,
    /// Kernel functions with which detours read memory; `None` if there are none.
    pub(crate) readers: Option<Readers>,
    /// Location of a task's stack; `None` if it is not known.
    pub(crate) stack: Option<StackFields>,
}
