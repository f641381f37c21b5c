//! Operations of the host, as data.

use super::alu::{Binary, Unary};
use super::flow::{Condition, Count, Target};
use super::operand::{Address, Register, Source};
use crate::Gva;
use crate::regs::Gpr;

/// The operation by which the host carries out an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulated(pub(in crate::insn) Operation);

/// An operation with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::insn) enum Operation {
    /// Only advances RIP: `nop` of any length, `endbr64`.
    Nop,
    /// Pushes 64 bits.
    Push(Source),
    /// Pops 64 bits.
    Pop(Gpr),
    PushFlags,
    PopFlags,
    Move {
        to: Register,
        from: Source,
    },
    Lea {
        to: Register,
        address: Address,
    },
    Binary {
        operation: Binary,
        to: Register,
        from: Source,
    },
    Unary {
        operation: Unary,
        to: Register,
    },
    /// `cld` and the like: clears the flags `clear`, sets the flags `set`, then flips the flags `flip`.
    Flags {
        clear: u64,
        set: u64,
        flip: u64,
    },
    EnableInterrupts,
    Call(Target),
    Jump(Target),
    Branch {
        condition: Condition,
        target: Gva,
    },
    CountedBranch {
        count: Count,
        counter: Register,
        target: Gva,
    },
    /// `ret`, which releases `release` bytes of arguments.
    Return {
        release: u16,
    },
    Leave,
}
