//! Conditions of a probe: comparisons of a register with a constant.
//!
//! The host evaluates them ([`Condition::holds`]), and detours contain them as code; both must give the same
//! result.

use crate::regs::Gpr;

/// An unsigned comparison of a register with a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The register.
    pub register: Gpr,
    /// The comparison.
    pub comparison: Comparison,
    /// The constant.
    pub value: u64,
}

/// A comparison of unsigned 64-bit numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Equal.
    Equal,
    /// Not equal.
    NotEqual,
    /// Less.
    Less,
    /// Less or equal.
    LessOrEqual,
    /// Greater.
    Greater,
    /// Greater or equal.
    GreaterOrEqual,
    /// At least one bit is set in both numbers.
    AnyBit,
}

impl Condition {
    /// Returns whether the condition holds if its register has the value `register`.
    #[must_use]
    pub fn holds(&self, register: u64) -> bool {
        match self.comparison {
            Comparison::Equal => register == self.value,
            Comparison::NotEqual => register != self.value,
            Comparison::Less => register < self.value,
            Comparison::LessOrEqual => register <= self.value,
            Comparison::Greater => register > self.value,
            Comparison::GreaterOrEqual => register >= self.value,
            Comparison::AnyBit => register & self.value != 0,
        }
    }
}
