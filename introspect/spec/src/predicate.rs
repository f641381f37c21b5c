//! A filter whose fields have been found: what is compared with what at each hit.
//!
//! Invariant: everything that a comparison needs is in the event that it is about, and all that depends on
//! types was decided before: at a hit there are numbers and bytes only.

use crate::argument::{Bits, Source};
use crate::fetch::Operator;

/// Which hits count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Predicate {
    /// A comparison. One with what could not be read does not hold, whichever it is.
    Check(Check),
    /// The other hits.
    Not(Box<Self>),
    /// Those for which all hold.
    All(Vec<Self>),
    /// Those for which any holds.
    Any(Vec<Self>),
}

/// A comparison of a value of the event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The value.
    pub field: Field,
    /// How, and with what, it is compared.
    pub with: With,
}

/// A value of an event that can be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// A number.
    Number {
        /// Where it is.
        source: Source,
        /// Its size in bytes, 1 to 8.
        size: u8,
        /// Which of its bits, when it is not all of them.
        bits: Option<Bits>,
        /// Whether it is in two's complement.
        signed: bool,
    },
    /// A text: up to its first NUL, if it has one.
    Text(Source),
    /// The thread: `task_struct.pid`.
    Pid,
    /// The process: `task_struct.tgid`.
    Tgid,
    /// The number of the virtual CPU.
    Cpu,
}

/// How a value is compared, and with what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum With {
    /// As a number, in two's complement; never [`Operator::Glob`].
    Number(Operator, u64),
    /// As a text: [`Operator::Equal`], [`Operator::NotEqual`] or [`Operator::Glob`], and no other.
    Text(Operator, Box<[u8]>),
}
