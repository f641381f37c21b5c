//! Changes to an instruction that moves.

use crate::Gva;

/// How the bytes must change when the instruction moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relocation {
    /// The bytes stay the same.
    Verbatim,
    /// The 32-bit displacement at `offset` must lead to `target`, relative to the instruction's end.
    Displacement { offset: u8, target: Gva },
    /// A conditional jump. The condition is the low half of its opcode.
    Jcc { condition: u8, target: Gva },
}
