//! What the engine needs from the machine it probes.
//!
//! Invariant: guest text and the probe table change only inside [`World::stopped`], while no virtual CPU executes
//! guest code and no virtual CPU is in a stepped slot.

use std::sync::Arc;
use std::time::Duration;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva, Regs};
use hvprobe_hit::table::ProbeTable;

/// Why the virtual CPUs could not be stopped. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// A virtual CPU did not acknowledge in time.
    #[error("virtual CPU {vcpu} did not stop within {waited:?}")]
    Unresponsive {
        /// Index of the virtual CPU.
        vcpu: usize,
        /// Time spent waiting for it.
        waited: Duration,
    },
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
}

/// State of a stopped virtual CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// General registers. RIP is the address of the next instruction to execute.
    pub regs: Regs,
    /// GS base: the per-CPU base if RIP is in the kernel.
    pub gs_base: u64,
    /// Physical address of the next instruction, from the virtual CPU's own page tables, if the instruction is in
    /// the kernel or a module.
    pub text: Option<Gpa>,
}

impl Standing {
    /// Returns the address of the next instruction to execute.
    #[must_use]
    pub fn rip(&self) -> Gva {
        Gva(self.regs.rip)
    }

    /// Returns the stack pointer.
    #[must_use]
    pub fn rsp(&self) -> Gva {
        Gva(self.regs.rsp)
    }

    /// Returns all addresses that the virtual CPU may go to without reading memory: RIP and the values of its
    /// general registers.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Gva> {
        // The last word is RFLAGS, not an address.
        let words = self.regs.words().iter().take(Regs::COUNT - 1);
        words.copied().map(Gva)
    }
}

/// A change that is made while the guest is stopped. Takes the guest's memory, and the states of the virtual CPUs
/// except those that have not begun or have ended. Returns the table that the virtual CPUs use from then on, or
/// `None` if they keep theirs.
pub type WhileStopped<'a> = dyn FnMut(&dyn PhysMemory, &[Standing]) -> Option<Arc<ProbeTable>> + 'a;

/// The machine, as the engine's control side sees it.
pub trait World {
    /// Returns the guest's memory, which the guest may be writing at the same time.
    fn memory(&self) -> &dyn PhysMemory;

    /// Stops every virtual CPU outside the stepped slots, and runs `change` once. If `change` returns a table,
    /// gives it to every virtual CPU. Then lets the virtual CPUs run again. Returns how long they were stopped,
    /// from the request to stop until they were released.
    ///
    /// # Errors
    /// When a virtual CPU cannot be stopped; then `change` has not run.
    fn stopped(&self, change: &mut WhileStopped<'_>) -> Result<Duration, StopError>;

    /// Returns whether the guest has ended, so that long operations can be skipped.
    fn has_ended(&self) -> bool;

    /// Starts or stops logging the pages that the guest writes. Returns whether that was done. No log is started
    /// while another one is active, or if writes cannot be logged.
    fn note_writes(&self, on: bool) -> bool;

    /// Returns the pages that the guest has written since the last call, or since logging began; `None` if they
    /// are not known.
    fn written(&self) -> Option<Vec<Gpa>>;

    /// Passes on all finished records of detours, and waits until that is done. Does not wait for a record that an
    /// interrupted task has begun.
    fn collect(&self);
}
