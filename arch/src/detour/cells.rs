//! Cells of the ring, and the words in them.
//!
//! The first word of each cell is its mark. The other words belong to the record; they are numbered as if there
//! were no marks between them.

/// Size of a cell in bytes: a cache line.
pub const CELL: usize = 64;
/// Maximum number of cells of a record, not counting a copy of the stack.
pub const RECORD_CELLS: u16 = 16;
/// Maximum number of cells of a copy of the stack: enough for [`STACK_MAX`](super::STACK_MAX) bytes.
pub(super) const STACK_CELLS: u16 = 74;
/// Maximum number of cells of a record, including a copy of the stack.
pub const MAX_RECORD_CELLS: u16 = RECORD_CELLS + STACK_CELLS;

/// How the numbered words of a structure are laid out in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// Words are contiguous.
    Dense,
    /// Words are in cells, after the marks.
    Cells,
}

impl Spread {
    /// Number of words of a cell, without its mark.
    pub(super) const CELL_WORDS: usize = CELL / 8 - 1;

    /// Returns the byte offset of the word number `word`.
    pub(super) fn offset(self, word: usize) -> usize {
        match self {
            Self::Dense => 8 * word,
            Self::Cells => {
                let (cell, word) = (word / Self::CELL_WORDS, word % Self::CELL_WORDS);
                CELL * cell + 8 + 8 * word
            }
        }
    }
}

/// Why bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end too early.
    #[error("{have} bytes where at least {want} belong")]
    Short {
        /// Number of bytes there are.
        have: usize,
        /// Number of bytes that are needed.
        want: usize,
    },
    /// The record is not finished, or there is none.
    #[error("there is no finished record at this place")]
    Unfinished,
    /// No record, or no record of this source, has this number of cells.
    #[error("a record of {found} cells where one of {want} belongs")]
    Cells {
        /// Number of cells in the record's mark.
        found: u16,
        /// Number of cells that a record must have here, or the maximum if several numbers are possible.
        want: u16,
    },
}

/// Returns the `N` bytes at offset `at`.
pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Malformed> {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .ok_or(Malformed::Short {
            have: bytes.len(),
            want: at + N,
        })
}

/// Returns the word at offset `at`.
pub(super) fn word(bytes: &[u8], at: usize) -> Result<u64, Malformed> {
    array(bytes, at).map(u64::from_le_bytes)
}
