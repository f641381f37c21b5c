//! Cells, and the words in them.
//!
//! The first word of each cell is its mark; the words of a record are the others, numbered as if they were
//! one behind the other.

/// The size of a cell in bytes: a cache line.
pub const CELL: usize = 64;
/// The most cells a record has, but for a copy of the stack.
pub const RECORD_CELLS: u16 = 16;
/// The most cells of a copy of the stack: those of [`STACK_MAX`](super::STACK_MAX) bytes.
pub(super) const STACK_CELLS: u16 = 74;
/// The most cells a record has.
pub const MAX_RECORD_CELLS: u16 = RECORD_CELLS + STACK_CELLS;

/// How words that are numbered from zero lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// One behind the other.
    Dense,
    /// Behind the marks of cells.
    Cells,
}

impl Spread {
    /// The words of a cell, without its mark.
    pub(super) const CELL_WORDS: usize = CELL / 8 - 1;

    /// Where the word is.
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

/// Why bytes are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They end too early.
    #[error("{have} bytes where at least {want} belong")]
    Short {
        /// How many there are.
        have: usize,
        /// How many are needed.
        want: usize,
    },
    /// Not finished, or there is none.
    #[error("there is no finished record at this place")]
    Unfinished,
    /// A size that no record, or no record of this source, has.
    #[error("a record of {found} cells where one of {want} belongs")]
    Cells {
        /// What the record says.
        found: u16,
        /// What is possible: the most, where it depends on the hit.
        want: u16,
    },
}

/// The `N` bytes at `at`.
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

/// The word at `at`.
pub(super) fn word(bytes: &[u8], at: usize) -> Result<u64, Malformed> {
    array(bytes, at).map(u64::from_le_bytes)
}
