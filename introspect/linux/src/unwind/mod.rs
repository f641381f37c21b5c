//! Unwinds the stack of the kernel, from each function to its caller.
//!
//! Invariants: only the unwind tables (ORC) of the kernel and its modules are followed; nothing is guessed. Where
//! the tables have no rule, or the guest's memory does not fit the rule, the stack ends and is reported as
//! incomplete. The room for frames bounds the work, even if tables and stacks are hostile.

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
