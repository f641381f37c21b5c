//! The stored form of a displaced instruction.

use super::decode::MAX_LEN;
use super::emulate::{self, Emulated, Operation};
use super::memory::{Effect, Memory, MemoryFault};
use super::relocation::Relocation;
use crate::Gva;
use crate::regs::{Regs, rflags};

/// An instruction that a breakpoint displaces, with what is needed to carry it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Displaced {
    pub(super) at: Gva,
    pub(super) bytes: [u8; MAX_LEN],
    pub(super) len: u8,
    pub(super) action: Action,
    /// How a copy is made; `None` if a copy would not do the same.
    pub(super) relocation: Option<Relocation>,
}

impl Displaced {
    /// Returns the address of the instruction.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// Returns the bytes of the instruction.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Returns the address just after the instruction.
    #[must_use]
    pub fn next(&self) -> Gva {
        self.at.wrapping_add(u64::from(self.len))
    }

    /// Returns how a copy is made; `None` if a copy would not do the same.
    pub(crate) fn copying(&self) -> Option<Relocation> {
        self.relocation
    }

    /// Returns the cheapest way to carry the instruction out.
    #[must_use]
    pub fn action(&self) -> Action {
        self.action
    }

    /// Carries out the instruction on `regs`, RIP included, at the kernel's privilege level, 0. The old value of
    /// RIP is ignored. Hit path: at most two memory accesses, no decoding, no allocation.
    ///
    /// Where it matters, the caller has to handle the following:
    ///
    /// - A trap flag that was already set in `regs` raises no #DB. (If `popfq` sets the flag, the processor itself
    ///   raises #DB after the next instruction.)
    /// - A call pushes nothing on a shadow stack, and a return pops nothing from it.
    /// - The state of indirect branch tracking does not change: an indirect branch does not begin to wait for
    ///   `endbr64`, and an emulated `endbr64` does not end such a wait.
    ///
    /// # Errors
    /// When memory cannot be accessed, or when the instruction goes to an address that no kernel code can have;
    /// then `regs` and memory are unchanged.
    ///
    /// # Panics
    /// When the action is not [`Emulate`](Action::Emulate).
    #[inline]
    pub fn emulate(&self, regs: &mut Regs, mem: &mut impl Memory) -> Result<Effect, MemoryFault> {
        let Action::Emulate(Emulated(operation)) = self.action else {
            unreachable!("{} is not emulated", self.at);
        };
        // With function tracing built in, most functions of a kernel begin with a nop.
        if operation == Operation::Nop {
            regs.rip = self.next().0;
            regs.rflags &= !rflags::RF;
            return Ok(Effect::Done);
        }
        emulate::execute(operation, self.next(), regs, mem)
    }
}

/// How a displaced instruction is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// By the host, on the saved registers, with [`Displaced::emulate`].
    Emulate(Emulated),
    /// By the guest, which runs the copy that [`Displaced::boosted`] makes.
    Boost,
}
