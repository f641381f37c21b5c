//! Memory that emulated instructions access, and effects that the caller still has to apply.

use crate::Gva;
use crate::paging::WalkError;

/// The guest's memory, as the kernel sees it at a hit.
pub trait Memory {
    /// Reads the 64-bit word at `at`, which need not be aligned.
    ///
    /// # Errors
    /// When the guest could not read there.
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault>;

    /// Stores `value` at `at`, which need not be aligned.
    ///
    /// # Errors
    /// When the guest could not write there; then nothing has changed.
    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), MemoryFault>;
}

/// An instruction accesses memory that cannot be accessed, or goes to an address that cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot reach the word at {at}")]
pub struct MemoryFault {
    /// Address of the word, or the address at which the instruction was to continue.
    pub at: Gva,
    /// The cause.
    #[source]
    pub cause: WalkError,
}

/// What remains to be done for an emulated instruction, besides registers and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing.
    Done,
    /// `sti` enabled interrupts: they stay held off until after the next instruction (SDM vol. 2, STI). The
    /// caller has to put the processor into that state.
    Shadow,
}

/// Refuses an address at which there can be no kernel code. In every paging mode, Linux keeps its code at addresses
/// for which 48 bits are enough. A vCPU whose RIP has more bits than its paging translates could not be entered
/// again (SDM vol. 3, "Checks on Guest RIP, RFLAGS, and SSP").
pub(super) fn reachable(target: Gva) -> Result<Gva, MemoryFault> {
    let canonical = (target.0 << 16).cast_signed() >> 16;
    if canonical.cast_unsigned() == target.0 {
        return Ok(target);
    }
    Err(MemoryFault {
        at: target,
        cause: WalkError::NonCanonical { at: target },
    })
}
