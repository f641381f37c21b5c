//! Items that a detour reads from memory, and where a record holds them.
//!
//! After its stack words, a record with such items has a word of bits, and then a *room* for each item. The bit of
//! an item is set if the item could not be read. Bytes of a room that the detour did not write hold what was in the
//! ring before. The host never uses such bytes: it ignores the room of an item whose bit is set, and the bytes
//! after the end of a text.

use super::cells::{Malformed, Spread, word};
use super::error::BuildError;
use crate::Gva;
use crate::fetch::{Fetched, Read, TextHeader};

/// Maximum number of items of one record; each has a bit in the record's word of bits.
const ITEMS_MAX: usize = 32;

/// Memory that is read at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetching {
    /// The guest's functions that read it.
    pub readers: Readers,
    /// The items that are read.
    pub items: Vec<Fetched>,
}

/// Functions of the guest's kernel that load from memory and survive a fault.
///
/// Each is called with an address in RAX. If the memory can be read, RDX becomes its value, zero-extended, and
/// RAX zero; otherwise RAX becomes nonzero and RDX zero (`bad_get_user` in arch/x86/lib/getuser.S). All other
/// registers are preserved; the arithmetic flags are not, and AC may be cleared. The functions are in the order
/// of their sizes: 1, 2, 4 and 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readers {
    /// Functions for addresses of the kernel's half.
    pub kernel: [Gva; 4],
    /// Functions for addresses of a process.
    pub process: [Gva; 4],
    /// Start of the kernel's half.
    pub kernel_half: Gva,
    /// End of the addresses that a process may have (`TASK_SIZE_MAX`): a page before the end of the lower half
    /// of canonical addresses.
    pub process_end: Gva,
    /// Where the pointer to the current task is: an offset from the base of GS, sign-extended.
    pub current: u32,
    /// Offset in the task of `pagefault_disabled` (i32). While that is not zero, a load that faults on a page of
    /// the process fails at once.
    pub disabled: i32,
}

/// Positions of the items in a record, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rooms {
    /// Position of the word of bits.
    unread: usize,
    rooms: Vec<Room>,
    end: usize,
}

/// Room of one item: its first word, and the number of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) first: usize,
    pub(super) words: usize,
    read: Read,
}

impl Room {
    /// Returns the offset in a record of byte `at` of the item.
    pub(super) fn offset(self, at: usize) -> usize {
        Spread::Cells.offset(self.first + at / 8) + at % 8
    }
}

impl Rooms {
    /// Lays out rooms for `items`, from the word `first` on.
    pub(super) fn new(first: usize, items: &[Fetched]) -> Result<Self, BuildError> {
        if items.len() > ITEMS_MAX {
            return Err(BuildError::TooManyItems { count: items.len() });
        }
        let mut end = first + 1;
        let rooms = items.iter().map(|item| {
            let words = match item.read {
                Read::Bytes(len) => usize::from(len).div_ceil(8),
                // At least one byte more than `most`: it shows whether the text ends there or is longer.
                Read::Text(most) => usize::from(most) / 8 + 1,
            };
            let first = end;
            end += words;
            let read = item.read;
            Room { first, words, read }
        });
        Ok(Self {
            unread: first,
            rooms: rooms.collect(),
            end,
        })
    }

    pub(super) fn unread(&self) -> usize {
        Spread::Cells.offset(self.unread)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Room> {
        self.rooms.iter().copied()
    }

    /// Returns the number of the word after the last room.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// Returns the room of the item `index`; `None` if the record has no such item, or the item could not be read.
    fn room(&self, record: &[u8], index: usize) -> Result<Option<Room>, Malformed> {
        let unread = word(record, self.unread())?;
        let room = self.rooms.get(index).copied();
        Ok(room.filter(|_| unread >> index & 1 == 0))
    }

    /// Copies the bytes of the item `index` to `into`. Returns whether the item could be read.
    pub(super) fn bytes(
        &self,
        record: &[u8],
        index: usize,
        into: &mut [u8],
    ) -> Result<bool, Malformed> {
        let Some(room) = self.room(record, index)? else {
            return Ok(false);
        };
        room.copy(record, into)?;
        Ok(true)
    }

    /// Copies the text of the item `index` to the front of `into`. Returns `None` if the text could not be read.
    pub(super) fn text(
        &self,
        record: &[u8],
        index: usize,
        into: &mut [u8],
    ) -> Result<Option<TextHeader>, Malformed> {
        let Some(room) = self.room(record, index)? else {
            return Ok(None);
        };
        room.copy(record, into)?;
        let most = match room.read {
            Read::Text(most) | Read::Bytes(most) => usize::from(most).min(into.len()),
        };
        let end = into[..most].iter().position(|byte| *byte == 0);
        let mut next = [0];
        if end.is_none() {
            room.copy_from(record, most, &mut next)?;
        }
        let len = u16::try_from(end.unwrap_or(most)).unwrap_or(u16::MAX);
        let truncated = end.is_none() && next != [0];
        Ok(Some(TextHeader { len, truncated }))
    }
}

impl Room {
    fn copy(self, record: &[u8], into: &mut [u8]) -> Result<(), Malformed> {
        self.copy_from(record, 0, into)
    }

    /// Copies the bytes from `at` on, until `into` is full or the room ends.
    fn copy_from(self, record: &[u8], at: usize, into: &mut [u8]) -> Result<(), Malformed> {
        let mut at = at;
        let mut into = into;
        while !into.is_empty() && at / 8 < self.words {
            let bytes = word(record, Spread::Cells.offset(self.first + at / 8))?.to_le_bytes();
            let bytes = &bytes[at % 8..];
            let (front, behind) = into.split_at_mut(bytes.len().min(into.len()));
            front.copy_from_slice(&bytes[..front.len()]);
            at += front.len();
            into = behind;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
