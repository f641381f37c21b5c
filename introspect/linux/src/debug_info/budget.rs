//! How much work one question is worth.
//!
//! Invariant: whatever the file says, the steps taken for one question are bounded by the size of its debug
//! information, and end soon after nobody waits for the answer any more, but for those of the index. Damaged tables can refer to each other over
//! and over; sound ones never need as much.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::DebugError;

/// Steps for files of any size.
const LEAST: u64 = 1 << 18;
/// Steps for each byte of debug information: reading all of it once takes about one.
const PER_BYTE: u64 = 8;

/// The steps that are left.
#[derive(Debug)]
pub(super) struct Budget {
    most: u64,
    left: Cell<u64>,
    abandoned: Arc<AtomicBool>,
}

impl Budget {
    /// For debug information of so many bytes, until nobody waits for the answer.
    pub(super) fn new(bytes: usize, abandoned: &Arc<AtomicBool>) -> Self {
        let most = u64::try_from(bytes).unwrap_or(u64::MAX);
        let most = most.saturating_mul(PER_BYTE).saturating_add(LEAST);
        Self {
            most,
            left: Cell::new(most),
            abandoned: Arc::clone(abandoned),
        }
    }

    /// Whether anybody waits does not matter.
    pub(super) fn never_abandoned(&mut self) {
        self.abandoned = Arc::default();
    }

    /// Begins a question.
    pub(super) fn begin(&self) {
        self.left.set(self.most);
    }

    /// Takes steps.
    pub(super) fn spend(&self, steps: usize) -> Result<(), DebugError> {
        if self.abandoned.load(Ordering::Relaxed) {
            return Err(DebugError::Abandoned);
        }
        let steps = u64::try_from(steps).unwrap_or(u64::MAX);
        let left = self.left.get().checked_sub(steps);
        self.left.set(left.ok_or(DebugError::TooMuch)?);
        Ok(())
    }
}
