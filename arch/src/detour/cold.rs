//! Uncommon cases of reads. Their code comes last, so that the common case takes no jump.

use super::fetching::Room;
use crate::Gva;
use iced_x86::code_asm::CodeLabel;

/// Cold code for an item that cannot be read: sets the item's bit, and continues at `next`.
pub(super) struct Unread {
    pub(super) label: CodeLabel,
    /// Offset in the record of the word of bits.
    pub(super) at: usize,
    pub(super) bit: usize,
    pub(super) next: CodeLabel,
}

/// Cold code for the uncommon cases of a text.
pub(super) struct Slowly {
    /// Readers of one byte and of eight bytes.
    pub(super) one: Gva,
    pub(super) eight: Gva,
    pub(super) fault: CodeLabel,
    pub(super) room: Room,
    /// Maximum number of bytes of the text.
    pub(super) most: usize,
    /// Labels for each word of the straight path, which reads without a loop.
    pub(super) ends: Vec<End>,
    /// Reads the words after those of the straight path.
    pub(super) more: CodeLabel,
    /// Where the code continues when the text has ended.
    pub(super) done: CodeLabel,
}

/// Labels for the uncommon cases of one word of the straight path.
pub(super) struct End {
    /// Checks whether the word contains the end of the text.
    pub(super) end: CodeLabel,
    /// Where the next word is read.
    pub(super) next: CodeLabel,
    /// Reads byte by byte, because the word could not be read at once.
    pub(super) nothing: CodeLabel,
}
