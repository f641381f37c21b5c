//! The atomics, the lock and two of the sizes that [`calls`](crate::calls) uses.
//!
//! `tests/loom_calls.rs` compiles the same source of `calls` with loom's atomics and with smaller sizes.

pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

/// Number of consecutive cells in which a task may be, starting with the cell that its address hashes to.
pub(crate) const WINDOW: usize = 32;
/// Binary logarithm of the number of instances in the first segment of a pool.
pub(crate) const FIRST_LOG2: u32 = 4;
