//! Control flow: conditions, counters and targets.

use super::operand::{Address, Register};
use crate::Gva;
use crate::insn::memory::{Memory, MemoryFault, reachable};
use crate::regs::{Gpr, Regs, rflags};

/// Target of a jump or call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Target {
    /// Known from the instruction's own bytes.
    Known(Gva),
    /// The value of a register.
    Register(Gpr),
    /// The word at an address.
    Memory(Address),
}

impl Target {
    /// Returns the target address, if the processor can go there.
    pub(super) fn find(self, regs: &Regs, mem: &mut impl Memory) -> Result<Gva, MemoryFault> {
        let target = match self {
            Self::Known(target) => target,
            Self::Register(register) => Gva(regs.get(register)),
            Self::Memory(address) => Gva(mem.read_u64(address.of(regs))?),
        };
        reachable(target)
    }
}

/// A condition, as the low half of a conditional jump's opcode (SDM vol. 1, appendix B).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Condition(pub(in super::super) u8);

impl Condition {
    pub(super) fn holds(self, flags: u64) -> bool {
        let has = |flag| flags & flag != 0;
        let less = has(rflags::SF) != has(rflags::OF);
        let base = match self.0 >> 1 & 7 {
            0 => has(rflags::OF),
            1 => has(rflags::CF),
            2 => has(rflags::ZF),
            3 => has(rflags::CF | rflags::ZF),
            4 => has(rflags::SF),
            5 => has(rflags::PF),
            6 => less,
            _ => has(rflags::ZF) || less,
        };
        // Each odd condition is the negation of the even one before it.
        base != (self.0 & 1 == 1)
    }
}

/// What a branch does with RCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Count {
    /// `jrcxz`, `jecxz`: jumps if the counter is zero.
    Zero,
    /// `loop`: counts down, and jumps unless the counter has become zero.
    Down,
    /// `loope`: like `loop`, but jumps only if ZF is set.
    DownWhileEqual,
    /// `loopne`: like `loop`, but jumps only if ZF is clear.
    DownWhileNotEqual,
}

impl Count {
    /// Counts `counter` down, if the branch counts, and returns whether the branch is taken. `counter` is RCX or
    /// ECX, depending on the address size.
    pub(super) fn is_taken(self, counter: Register, regs: &mut Regs) -> bool {
        if self != Self::Zero {
            let value = counter.read(regs).wrapping_sub(1);
            counter.write(regs, value);
        }
        let is_zero = counter.read(regs) == 0;
        let is_equal = regs.rflags & rflags::ZF != 0;
        match self {
            Self::Zero => is_zero,
            Self::Down => !is_zero,
            Self::DownWhileEqual => !is_zero && is_equal,
            Self::DownWhileNotEqual => !is_zero && !is_equal,
        }
    }
}
