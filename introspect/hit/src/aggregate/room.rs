//! The memory of all histograms of a machine.
//!
//! Invariant: what is taken never exceeds what there is. Who takes gives back as much.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many bytes there may be, of which some are taken.
#[derive(Debug)]
pub struct Room {
    left: AtomicUsize,
}

impl Room {
    /// So many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self {
            left: AtomicUsize::new(bytes),
        }
    }

    /// Bytes that nobody has.
    #[must_use]
    pub fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    /// Takes this many bytes if there are as many; returns whether there were.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        let took = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        took.is_ok()
    }

    /// Gives back this many bytes, which were taken.
    pub(super) fn give_back(&self, bytes: usize) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
    }
}
