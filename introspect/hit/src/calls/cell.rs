//! Head of the list of one task's calls.

use crate::atomics::AtomicU64;

/// The cell is open.
pub(super) const BUSY: u64 = 1;
/// The cell has no entries.
pub(super) const IDLE: u64 = 2;

#[derive(Debug)]
pub(super) struct Cell {
    /// The task's address with its low bits replaced by [`BUSY`] or [`IDLE`]; 0 when never used.
    pub(super) state: AtomicU64,
    /// [`Link`](super::pool::Link) to the newest entry.
    pub(super) newest: AtomicU64,
}
