//! Following the stack of the kernel, from one function to the one that called it.
//!
//! What is kept true: the kernel's own unwind tables (ORC) say how, and nothing is guessed. Where they
//! do not say, or the guest's memory does not hold what they say, the stack ends, and that it goes on is
//! told. Work is bounded by the room for frames, whatever tables and stacks hold.

mod error;
mod orc;
mod rule;
mod walk;

pub use error::OrcError;
pub use orc::Orc;
pub(crate) use orc::Tables;
pub use walk::{Start, Surroundings, walk};

#[cfg(test)]
mod tests;
