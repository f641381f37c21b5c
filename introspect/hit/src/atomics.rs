//! The atomics and the lock of [`calls`](crate::calls), and its sizes that a model checker wants small.
//!
//! `tests/loom_calls.rs` takes the same source of `calls` with atomics and sizes of its own.

pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

/// In how many cells from the one it hashes to a task may be.
pub(crate) const WINDOW: usize = 32;
/// The binary logarithm of the number of instances in the first segment of a pool.
pub(crate) const FIRST_LOG2: u32 = 4;
