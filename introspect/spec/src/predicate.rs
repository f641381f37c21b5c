//! A filter with resolved fields: the comparisons to make at each hit.
//!
//! Invariant: the event contains everything that the comparisons need, and everything that depends on types is
//! already resolved. Only numbers and bytes of a hit are left.

use crate::argument::{Bits, Source};
use crate::fetch::Operator;

/// Condition that selects hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Predicate {
    /// Comparison. If the value could not be read, the comparison is false for every operator.
    Check(Check),
    /// Negation: true if the inner condition is false.
    Not(Box<Self>),
    /// True if all conditions are true.
    All(Vec<Self>),
    /// True if any condition is true.
    Any(Vec<Self>),
}

/// Comparison of a value of the event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Value of the event.
    pub field: Field,
    /// Operator and operand of the comparison.
    pub with: With,
}

/// Value of an event that can be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// Number.
    Number {
        /// Place of the number in the event.
        source: Source,
        /// Size in bytes, 1 to 8.
        size: u8,
        /// Position of the bit field in these bytes; `None` if the number is no bit field.
        bits: Option<Bits>,
        /// Whether the number is in two's complement.
        signed: bool,
    },
    /// Text, up to its first NUL if it has one.
    Text(Source),
    /// Id of the thread: `task_struct.pid`.
    Pid,
    /// Id of the process: `task_struct.tgid`.
    Tgid,
    /// Number of the virtual CPU.
    Cpu,
}

/// Operator and operand of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum With {
    /// Comparison of numbers, in two's complement; never [`Operator::Glob`].
    Number(Operator, u64),
    /// Comparison of texts, only with [`Operator::Equal`], [`Operator::NotEqual`] or [`Operator::Glob`].
    Text(Operator, Box<[u8]>),
}
