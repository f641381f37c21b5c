//! What the host does, as data.

use super::alu::{Binary, Unary};
use super::flow::{Condition, Count, Target};
use super::operand::{Address, Register, Source};
use crate::Gva;
use crate::regs::Gpr;

/// What the host does to carry out an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulated(pub(in crate::insn) Operation);

/// An operation with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::insn) enum Operation {
    /// Nothing but going on: `nop` of any length, `endbr64`.
    Nop,
    /// Of 64 bits.
    Push(Source),
    /// Of 64 bits.
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
    /// `cld` and its kin: `flip`, after `clear` and `set`.
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
    /// `ret`, which releases so many bytes of arguments.
    Return {
        release: u16,
    },
    Leave,
}
