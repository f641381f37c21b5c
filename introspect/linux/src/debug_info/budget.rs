//! Limits the work done for one question.
//!
//! Invariant: the size of the debug information bounds the number of steps for one question. Damaged tables can
//! refer to each other over and over; sound ones never need as many steps. Except while the index is built, a
//! question also ends soon once nobody waits for its answer.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::DebugError;

/// Number of steps granted for every file, in addition to those for its bytes.
const LEAST: u64 = 1 << 18;
/// Number of steps granted for each byte of debug information. Reading all of it once takes about one step per
/// byte.
const PER_BYTE: u64 = 8;

/// Steps left for the current question.
#[derive(Debug)]
pub(super) struct Budget {
    most: u64,
    left: Cell<u64>,
    abandoned: Arc<AtomicBool>,
}

impl Budget {
    /// Creates the budget for `bytes` bytes of debug information. Questions end once `abandoned` is set.
    pub(super) fn new(bytes: usize, abandoned: &Arc<AtomicBool>) -> Self {
        let most = u64::try_from(bytes).unwrap_or(u64::MAX);
        let most = most.saturating_mul(PER_BYTE).saturating_add(LEAST);
        Self {
            most,
            left: Cell::new(most),
            abandoned: Arc::clone(abandoned),
        }
    }

    /// Lets questions continue even when nobody waits for the answer.
    pub(super) fn never_abandoned(&mut self) {
        self.abandoned = Arc::default();
    }

    /// Begins a question: grants it the full budget.
    pub(super) fn begin(&self) {
        self.left.set(self.most);
    }

    /// Takes `steps` steps from the budget. Fails if fewer are left, or if the question was abandoned.
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
