//! How much work one question is worth.
//!
//! Invariant: whatever the file says, the steps taken for one question are bounded by the size of its debug
//! information. Damaged tables can refer to each other over and over; sound ones never need as much.

use std::cell::Cell;

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
}

impl Budget {
    /// For debug information of so many bytes.
    pub(super) fn new(bytes: usize) -> Self {
        let most = u64::try_from(bytes).unwrap_or(u64::MAX);
        let most = most.saturating_mul(PER_BYTE).saturating_add(LEAST);
        Self {
            most,
            left: Cell::new(most),
        }
    }

    /// Begins a question.
    pub(super) fn begin(&self) {
        self.left.set(self.most);
    }

    /// Takes steps.
    pub(super) fn spend(&self, steps: usize) -> Result<(), DebugError> {
        let steps = u64::try_from(steps).unwrap_or(u64::MAX);
        let left = self.left.get().checked_sub(steps);
        self.left.set(left.ok_or(DebugError::TooMuch)?);
        Ok(())
    }
}
