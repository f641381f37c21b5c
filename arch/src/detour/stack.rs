//! Position of the stack's copy in a record, and access to it.
//!
//! ```text
//!   RSP ┌──────────────────────────────┐ end
//! └──┬──┴────────┬───────────┬─────────┘
//!    │ 7 words   │ 7 words   │ 7 words       in a cell each
//! ```
//!
//! Invariants: the last word of the last cell is the stack's last word; the first cell may begin with words below
//! RSP, which are not part of the stack.

use std::ops::Range;

use super::cells::{CELL, Malformed, STACK_CELLS, Spread, word};
use crate::Gva;

/// Maximum number of bytes of a stack that is copied. The host serves hits on deeper stacks.
pub const STACK_MAX: usize = 4096;
/// Number of bytes of a cell, without its mark.
pub(super) const CELL_BYTES: usize = 8 * Spread::CELL_WORDS;

const _: () = assert!(STACK_MAX.div_ceil(CELL_BYTES) == STACK_CELLS as usize);

/// Location of the current task's stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackFields {
    /// Where the pointer to the current task is: an offset from the base of GS, sign-extended.
    pub current: u32,
    /// Offset in the task of the pointer to its stack (`stack` of `task_struct`).
    pub stack: i32,
}

/// Position of the two words that describe the copy of the stack in a record: the address of the stack's end, then
/// the number of cells of the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyLayout {
    first: usize,
}

impl CopyLayout {
    /// Returns the layout whose first word is the word `first`.
    pub(super) fn new(first: usize) -> Self {
        Self { first }
    }

    /// Returns the number of the word after these two.
    pub(super) fn end(self) -> usize {
        self.first + 2
    }

    /// Returns the offset of the word that holds the address of the stack's end.
    pub(super) fn stack_end(self) -> usize {
        Spread::Cells.offset(self.first)
    }

    /// Returns the offset of the word that holds the number of cells.
    pub(super) fn cells(self) -> usize {
        Spread::Cells.offset(self.first + 1)
    }

    /// Returns the copy that `cells` of `record` hold.
    pub(super) fn of(self, record: &[u8], cells: Range<u16>) -> Result<StackCopy<'_>, Malformed> {
        let [from, to] = [cells.start, cells.end].map(|cells| usize::from(cells) * CELL);
        let cells = record.get(from..to).ok_or(Malformed::Short {
            have: record.len(),
            want: to,
        })?;
        let end = Gva(word(record, self.stack_end())?);
        Ok(StackCopy { end, cells })
    }
}

/// A copy of a stack.
#[derive(Clone, Copy, Debug)]
pub struct StackCopy<'a> {
    end: Gva,
    cells: &'a [u8],
}

impl StackCopy<'_> {
    /// Returns the word at the address `at`; `None` if the copy does not contain it.
    #[must_use]
    pub fn word(&self, at: Gva) -> Option<u64> {
        let bytes = self.cells.len() / CELL * CELL_BYTES;
        let first = Gva(self.end.0.checked_sub(u64::try_from(bytes).ok()?)?);
        let offset = usize::try_from(at.offset_from(first)?).ok()?;
        let is_word = offset.is_multiple_of(8) && offset < bytes;
        let at = is_word.then(|| Spread::Cells.offset(offset / 8))?;
        word(self.cells, at).ok()
    }
}
