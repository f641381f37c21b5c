//! What a fetch argument reads at a hit: a first value, and the pointers to follow from it.
//!
//! The host follows the pointers, and detours contain the same steps as code; both must give the same result.

use crate::regs::Gpr;

/// What a fetch argument reads: the value of `base`, or the memory that pointers lead to from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The first value.
    pub base: Base,
    /// Pointers to follow, beginning with the first value. Each but the last loads the value to which the next
    /// offset is added; the last one leads to what is read. If empty, the first value itself is read.
    pub pointers: Vec<Pointer>,
    /// What is read at the end.
    pub read: Read,
}

/// The value from which pointers are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The value of a register at the hit; for a return probe, at the return.
    Register(Gpr),
    /// For a return probe, the value of a register at the entry of the call.
    Entry(Gpr),
    /// A constant: an address, or any other number.
    Constant(u64),
    /// The address of the current task's `task_struct`.
    Task,
}

/// One pointer: the memory at an address relative to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Bytes added to the value.
    pub offset: i64,
    /// The memory that the address has to be in.
    pub memory: Memory,
}

/// The memory that an address belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// Memory of the kernel.
    #[default]
    Kernel,
    /// Memory of the current process.
    User,
    /// Memory of the kernel or of the process: the address decides which.
    Either,
}

/// What is read at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// This number of bytes.
    Bytes(u16),
    /// The bytes up to a NUL, at most this number. A [`TextHeader`] comes before them.
    Text(u16),
}

/// Header before the bytes of a text: their number, and whether the text was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextHeader {
    /// Number of bytes that follow.
    pub len: u16,
    /// Whether the text continues after these bytes.
    pub truncated: bool,
}

impl TextHeader {
    /// Size of a header in bytes.
    pub const SIZE: usize = 2;
    const TRUNCATED: u16 = 1 << 15;

    /// Encodes the header: the length, little-endian, with the highest bit set if the text is truncated.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let truncated = if self.truncated { Self::TRUNCATED } else { 0 };
        (self.len & !Self::TRUNCATED | truncated).to_le_bytes()
    }

    /// Decodes a header.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        let word = u16::from_le_bytes(bytes);
        Self {
            len: word & !Self::TRUNCATED,
            truncated: word & Self::TRUNCATED != 0,
        }
    }
}
