//! Carrying out simple instructions on the saved registers.
//!
//! Each operation changes registers and memory as the processor would (SDM vol. 2, "Operation" of the instruction).
//! Everything that can fail comes before the first change of a register, and a store is the last thing that can
//! fail. So after a fault neither registers nor memory have changed, and the guest can get the fault as if the
//! instruction had raised it.

mod alu;
mod execute;
mod flow;
mod operand;
mod operation;
#[cfg(test)]
mod tests;

pub(super) use alu::{Binary, Unary};
pub(super) use execute::execute;
pub(super) use flow::{Condition, Count, Target};
pub(super) use operand::{Address, Register, Source, Width};
pub use operation::Emulated;
pub(super) use operation::Operation;
