//! Memory budget of all histograms of a machine.
//!
//! Invariant: the bytes that are taken never exceed the budget. Each taker releases what it took.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A budget of bytes, which can be taken and released.
#[derive(Debug)]
pub struct MemoryBudget {
    left: AtomicUsize,
}

impl MemoryBudget {
    /// Creates a budget of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self {
            left: AtomicUsize::new(bytes),
        }
    }

    /// Returns the number of bytes that are not taken.
    #[must_use]
    pub fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    /// Takes `bytes` bytes if at least as many are left. Returns whether they were taken.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        let took = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        took.is_ok()
    }

    /// Releases `bytes` bytes that were taken.
    pub(super) fn release(&self, bytes: usize) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
    }
}
