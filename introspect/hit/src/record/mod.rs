//! The host's end of the ring that detours record into: the [`Reader`], which takes records out of the ring, the
//! sources of the records, and the events that are made from them.
//!
//! Invariants: a record is copied out of the guest's reach before it is decoded; a guest that writes nonsense here
//! only loses records, which are counted.

mod collection;
mod held_cells;
mod reader;
mod source;
mod sources;
mod stack;
mod stubs;
#[cfg(test)]
mod tests;

pub use collection::Collection;
pub use reader::Reader;
pub use source::{RecordSource, Stamp, Tallies, What, When};
pub use sources::{NESTED_MAX, RecordSources};
pub use stack::Follower;
pub(crate) use stubs::Stubs;
