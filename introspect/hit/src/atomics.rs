//! The atomics and the lock of [`calls`](crate::calls), and those of its sizes that a model checker needs small.
//!
//! `tests/loom_calls.rs` compiles the same source of `calls` with atomics and sizes of its own.

pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

/// Number of cells in which a task may be, starting with the one that its address hashes to.
pub(crate) const WINDOW: usize = 32;
/// Binary logarithm of the number of instances in the first segment of a pool.
pub(crate) const FIRST_LOG2: u32 = 4;
