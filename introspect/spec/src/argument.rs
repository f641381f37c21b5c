//! Descriptions of the values of an event: which there are, where each is in the event, and how it is printed.
//!
//! Invariant: an event and its argument descriptions are sufficient for printing, without any other knowledge of
//! the kernel.

use hvprobe_arch::regs::Gpr;

use crate::shape::Shape;

/// Value that each event of a probe has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Name, unique among the arguments of the probe.
    pub name: String,
    /// Place of the value in an event.
    pub source: Source,
    /// Position of the bit field in the bytes of the source; `None` if the value is no bit field.
    pub bits: Option<Bits>,
    /// Type. Bytes of the source beyond the type's size have no meaning.
    pub shape: Shape,
}

/// Place of a value in an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Registers, with eight bytes in each.
    Registers {
        /// The registers, in order.
        registers: Vec<Gpr>,
        /// Whether these are the registers at the entry of the call, in an event of its return. Otherwise, they are
        /// the registers at the hit.
        entry: bool,
    },
    /// Captured item at this position, from 0.
    Item(usize),
    /// No place in the event: constant bytes.
    Constant(Vec<u8>),
    /// Field that every event has.
    Common(Common),
}

/// Field that every event has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Common {
    /// Name of the task: a text.
    Comm,
    /// RIP.
    Ip,
    /// RFLAGS.
    Flags,
    /// Result of the function.
    Retval,
}

/// Bit field of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits {
    /// Position of the lowest bit.
    pub offset: u8,
    /// Number of bits.
    pub width: u8,
}
