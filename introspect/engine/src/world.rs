//! What the engine needs from the machine it probes.
//!
//! Invariant: guest text and the probe table change only inside [`World::stopped`], while no
//! virtual CPU executes guest code and none of them stands in an out-of-line slot.

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
        /// Its index.
        vcpu: usize,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
}

/// Where a stopped virtual CPU stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Its registers; RIP is the next instruction it executes.
    pub regs: Regs,
    /// Its GS base: the per-CPU base if RIP is the kernel's.
    pub gs_base: u64,
    /// Where that instruction lies, by the virtual CPU's own page tables, if it is the kernel's or a
    /// module's.
    pub text: Option<Gpa>,
}

impl Standing {
    /// The next instruction it executes.
    #[must_use]
    pub fn rip(&self) -> Gva {
        Gva(self.regs.rip)
    }

    /// Its stack pointer.
    #[must_use]
    pub fn rsp(&self) -> Gva {
        Gva(self.regs.rsp)
    }

    /// All addresses it may go to without reading memory: where it stands, and what its general
    /// registers hold.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Gva> {
        // The last one is no address.
        let words = self.regs.words().iter().take(Regs::COUNT - 1);
        words.copied().map(Gva)
    }
}

/// What is done to a stopped guest: takes its memory and where its virtual CPUs stand, without
/// those that have not begun or have ended; returns the table the virtual CPUs hold from then on,
/// or `None` to leave them the one they have.
pub type WhileStopped<'a> = dyn FnMut(&dyn PhysMemory, &[Standing]) -> Option<Arc<ProbeTable>> + 'a;

/// The machine, as the engine's control side sees it.
pub trait World {
    /// Guest memory, which the guest may be changing at the same time.
    fn memory(&self) -> &dyn PhysMemory;

    /// Stops every virtual CPU outside the slots, runs `change` once, hands the table it returns to
    /// every virtual CPU, and lets them go on. Returns for how long they were stopped, from the
    /// request to stop until they were let go.
    ///
    /// # Errors
    /// When a virtual CPU cannot be stopped; then `change` has not run.
    fn stopped(&self, change: &mut WhileStopped<'_>) -> Result<Duration, StopError>;

    /// Whether the guest runs no more, so that what takes long can be left off.
    fn has_ended(&self) -> bool;

    /// Begins to note which pages of the guest's memory it writes, unless they are being noted, or ends that.
    /// Whether it has begun, or ended.
    fn note_writes(&self, on: bool) -> bool;

    /// The pages that the guest has written since this was last asked, or since noting began. `None`
    /// if that cannot be told.
    fn written(&self) -> Option<Vec<Gpa>>;

    /// Hands on what detours have recorded up to now. Returns when that is done; a record that a
    /// task was interrupted in the middle of is not waited for.
    fn collect(&self);
}
