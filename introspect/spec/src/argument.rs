//! What the values of an event are: which there are, where in the event they are, and how they are
//! printed.
//!
//! Invariant: with its arguments an event says everything. No kernel is asked to print one.

use hvprobe_arch::regs::Gpr;

use crate::shape::Shape;

/// A value that each event of a probe has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Its name; of no other argument of the probe.
    pub name: String,
    /// Where in an event it is.
    pub source: Source,
    /// Which of its bits, when it is not all of them.
    pub bits: Option<Bits>,
    /// Its type. What the source has beyond its size means nothing.
    pub shape: Shape,
}

/// Where in an event a value is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// In registers, eight bytes in each.
    Registers {
        /// In these.
        registers: Vec<Gpr>,
        /// Whether as they were at the entry of the call that returns.
        entry: bool,
    },
    /// The captured item at this position, from 0.
    Item(usize),
    /// In none: it is always the same.
    Constant(Vec<u8>),
    /// Something that every event has.
    Common(Common),
}

/// What every event has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Common {
    /// The name of the task: a text.
    Comm,
    /// RIP.
    Ip,
    /// RFLAGS.
    Flags,
    /// What the function returned.
    Retval,
}

/// Some of the bits of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits {
    /// The first of them, from the lowest.
    pub offset: u8,
    /// How many.
    pub width: u8,
}
