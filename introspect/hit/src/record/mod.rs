//! The host's end of the ring that detours record into: the sources of records, the events that are made of
//! them, and the [`Reader`], which takes the records.
//!
//! Invariants: a record is copied out of the guest's reach before it is decoded; a guest that writes nonsense here
//! loses records, which are counted, and nothing else.

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
