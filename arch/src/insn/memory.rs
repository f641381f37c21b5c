//! What an instruction reaches beside registers, and what remains of it.

use crate::Gva;
use crate::paging::WalkError;

/// The guest's memory, as the kernel sees it at a hit.
pub trait Memory {
    /// The 64-bit word at `at`, which need not be aligned.
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

/// Memory cannot be accessed where the instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot reach the word at {at}")]
pub struct MemoryFault {
    /// The word's address, or the address the instruction was to continue at.
    pub at: Gva,
    /// Why.
    #[source]
    pub cause: WalkError,
}

/// What remains of an emulated instruction beyond the registers and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing.
    Done,
    /// `sti` enabled interrupts: they stay held off until after the next instruction (SDM vol. 2,
    /// STI). The caller tells the processor so.
    Shadow,
}

/// Refuses an address that no kernel code can be at: Linux keeps its code where 48 bits are enough
/// on any paging, and a virtual CPU that was sent beyond what its paging translates could not be
/// entered any more (SDM vol. 3, "Checks on Guest RIP, RFLAGS, and SSP").
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
