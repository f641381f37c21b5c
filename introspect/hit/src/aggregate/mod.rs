//! Histograms: count events by values that they have in common.
//!
//! Invariant: the memory is bounded for any values in a guest: an event for which there is no room is counted as
//! dropped. The collector's thread counts events, in the order in which it delivers them; the hit path is not
//! involved.

mod budget;
mod key;
mod snapshot;
mod table;

pub use budget::MemoryBudget;
pub use key::KeyValue;
pub use snapshot::{Row, Snapshot, Sum};
pub use table::{Copied, NoRoom, Table};
