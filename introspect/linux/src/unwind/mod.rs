//! Following the stack of the kernel, from one function to the one that called it.
//!
//! What is kept true: the unwind tables of the kernel and its modules (ORC) say how, and nothing is guessed. Where they
//! do not say, or the guest's memory does not hold what they say, the stack ends, and that it goes on is
//! told. Work is bounded by the room for frames, whatever tables and stacks hold.

mod error;
mod modules;
mod orc;
mod rule;
mod surroundings;
mod walk;

pub use error::OrcError;
pub use modules::ModuleTables;
pub(crate) use modules::Text;
pub use orc::Orc;
pub(crate) use orc::Tables;
pub use surroundings::Surroundings;
pub use walk::{Start, Unwinder};

#[cfg(test)]
mod tests;
