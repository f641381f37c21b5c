//! What a fetch argument reads at a hit: a first value, and the pointers to follow from there.
//!
//! The host follows them, and detours contain them as code; both must find the same.

use crate::regs::Gpr;

/// What a fetch argument reads: the value of `base`, or what pointers lead to from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The first value.
    pub base: Base,
    /// Where to go on from it. Each but the last leads to a pointer, which the next one is added to; the
    /// last one leads to what is read. Without any it is the first value itself that is read.
    pub pointers: Vec<Pointer>,
    /// What is there.
    pub read: Read,
}

/// The value that pointers start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// That of a register at the hit; for a return probe, as the function left it.
    Register(Gpr),
    /// That of a register as it was at the entry of the call that returns.
    Entry(Gpr),
    /// An address, or any number.
    Constant(u64),
    /// The address of the current task's `task_struct`.
    Task,
}

/// A step from a value to what is at an address beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Bytes added to the value.
    pub offset: i64,
    /// In whose memory the address has to be.
    pub memory: Memory,
}

/// Whose memory an address is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// The kernel's.
    #[default]
    Kernel,
    /// That of the process that runs.
    User,
    /// That of one of them: which one, the address tells.
    Either,
}

/// What is read at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// So many bytes.
    Bytes(u16),
    /// The bytes up to a NUL, at most so many. They follow a [`TextHeader`].
    Text(u16),
}

/// What comes before the bytes of a text: how many there are, and whether there would have been more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextHeader {
    /// How many bytes follow.
    pub len: u16,
    /// Whether the text goes on behind them.
    pub truncated: bool,
}

impl TextHeader {
    /// How many bytes it has.
    pub const SIZE: usize = 2;
    const TRUNCATED: u16 = 1 << 15;

    /// Its bytes: the length, little-endian, with the highest bit set if the text is truncated.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let truncated = if self.truncated { Self::TRUNCATED } else { 0 };
        (self.len & !Self::TRUNCATED | truncated).to_le_bytes()
    }

    /// The header whose bytes these are.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        let word = u16::from_le_bytes(bytes);
        Self {
            len: word & !Self::TRUNCATED,
            truncated: word & Self::TRUNCATED != 0,
        }
    }
}
