//! Histograms: events counted by what they have in common.
//!
//! Invariant: what is kept is bounded, whatever a guest's values are; an event that there is no room for is
//! counted as dropped. Events are counted by the collector's thread, in the order in which they are handed
//! on; the hit path knows nothing of it.

mod key;
mod room;
mod snapshot;
mod table;

pub use key::KeyValue;
pub use room::Room;
pub use snapshot::{Row, Snapshot, Sum};
pub use table::{Copied, NoRoom, Table};
