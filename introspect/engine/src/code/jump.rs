//! Jumps, and what the code they lead to has to know of the guest.

use std::sync::Arc;

use hvprobe_arch::detour::{Detour, Readers, Ring, StackFields, TaskFields};
use hvprobe_spec::ProbeId;

/// A site's jump.
#[derive(Clone, Debug)]
pub(crate) struct Jump {
    pub(crate) detour: Arc<Detour>,
    /// The probes it records for, in the order of their registration.
    pub(crate) members: Vec<ProbeId>,
}

impl Jump {
    /// Bytes of its detour.
    pub(crate) fn size(&self) -> u64 {
        self.detour.code().len() as u64
    }
}

/// What the detours need to know of the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DetourContext {
    pub(crate) ring: Ring,
    /// `None` where there is one processor.
    pub(crate) cpu: Option<u32>,
    pub(crate) task: Option<TaskFields>,
    /// What reads memory, if anything can.
    pub(crate) readers: Option<Readers>,
    /// Where a task's stack is, if that can be told.
    pub(crate) stack: Option<StackFields>,
}
