//! Arithmetic and logic on registers, with the flags it sets.
//!
//! The flags are those of the instruction's "Flags Affected" (SDM vol. 2). AF is undefined there after `and`,
//! `or`, `xor` and `test`; the processors of Intel and AMD clear it, and so does this code.

use super::operand::{Register, Source, Width};
use crate::regs::{Regs, rflags};

/// An operation on two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Binary {
    Add,
    Sub,
    And,
    Or,
    Xor,
    /// `sub` without a result.
    Cmp,
    /// `and` without a result.
    Test,
}

/// An operation on one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Unary {
    Inc,
    Dec,
    Neg,
    Not,
}

/// A result, with the arithmetic flags it sets.
#[derive(Clone, Copy)]
struct Outcome {
    value: u64,
    flags: u64,
}

pub(super) fn binary(operation: Binary, to: Register, from: Source, regs: &mut Regs) {
    let width = to.width;
    let (a, b) = (to.read(regs), from.read(regs) & width.mask());
    let outcome = match operation {
        Binary::Add => add(a, b, width),
        Binary::Sub | Binary::Cmp => subtract(a, b, width),
        Binary::And | Binary::Test => logic(a & b, width),
        Binary::Or => logic(a | b, width),
        Binary::Xor => logic(a ^ b, width),
    };
    regs.rflags = regs.rflags & !rflags::ARITHMETIC | outcome.flags;
    if !matches!(operation, Binary::Cmp | Binary::Test) {
        to.write(regs, outcome.value);
    }
}

pub(super) fn unary(operation: Unary, to: Register, regs: &mut Regs) {
    let width = to.width;
    let value = to.read(regs);
    let (outcome, affected) = match operation {
        // `inc` and `dec` do not change the carry flag.
        Unary::Inc => (add(value, 1, width), rflags::ARITHMETIC & !rflags::CF),
        Unary::Dec => (subtract(value, 1, width), rflags::ARITHMETIC & !rflags::CF),
        Unary::Neg => (subtract(0, value, width), rflags::ARITHMETIC),
        Unary::Not => (logic(!value & width.mask(), width), 0),
    };
    regs.rflags = regs.rflags & !affected | outcome.flags & affected;
    to.write(regs, outcome.value);
}

fn add(a: u64, b: u64, width: Width) -> Outcome {
    let value = a.wrapping_add(b) & width.mask();
    let overflow = (a ^ value) & (b ^ value);
    let carries = a ^ b ^ value;
    outcome(value, width, carries, value < a, overflow)
}

fn subtract(a: u64, b: u64, width: Width) -> Outcome {
    let value = a.wrapping_sub(b) & width.mask();
    let overflow = (a ^ b) & (a ^ value);
    let borrows = a ^ b ^ value;
    outcome(value, width, borrows, a < b, overflow)
}

fn logic(value: u64, width: Width) -> Outcome {
    outcome(value, width, 0, false, 0)
}

/// Returns `value` with the flags that it sets. `carries` holds the carry into each bit. The sign bit of `overflow`
/// says whether the operation overflowed.
fn outcome(value: u64, width: Width, carries: u64, carry: bool, overflow: u64) -> Outcome {
    let even_parity = (value & 0xff).count_ones().is_multiple_of(2);
    let flags = [
        (carry, rflags::CF),
        (even_parity, rflags::PF),
        (carries & 0x10 != 0, rflags::AF),
        (value == 0, rflags::ZF),
        (value & width.sign() != 0, rflags::SF),
        (overflow & width.sign() != 0, rflags::OF),
    ]
    .into_iter()
    .filter_map(|(is_set, flag)| is_set.then_some(flag))
    .fold(0, |flags, flag| flags | flag);
    Outcome { value, flags }
}
