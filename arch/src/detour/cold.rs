//! What of a read is not ordinary. Its code comes last, so that what is ordinary jumps nowhere.

use super::fetching::Room;
use crate::Gva;
use iced_x86::code_asm::CodeLabel;

/// An item could not be read.
pub(super) struct Unread {
    pub(super) label: CodeLabel,
    /// Offset in the record of the bits.
    pub(super) at: usize,
    pub(super) bit: usize,
    pub(super) next: CodeLabel,
}

/// What of a text is not ordinary.
pub(super) struct Slowly {
    /// The readers of a byte and of eight.
    pub(super) one: Gva,
    pub(super) eight: Gva,
    pub(super) fault: CodeLabel,
    pub(super) room: Room,
    /// How many bytes of it are wanted.
    pub(super) most: usize,
    /// Of each word that is read straight.
    pub(super) ends: Vec<End>,
    /// Goes on behind the words that were read.
    pub(super) more: CodeLabel,
    /// Where the text has ended.
    pub(super) done: CodeLabel,
}

/// What becomes of a word of a text that is not ordinary.
pub(super) struct End {
    /// Looks whether it has the end.
    pub(super) end: CodeLabel,
    /// Where the next one is read.
    pub(super) next: CodeLabel,
    /// It could not be read at once.
    pub(super) nothing: CodeLabel,
}
