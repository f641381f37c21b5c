//! What a detour reads of memory, and where a record has it.
//!
//! A record that reads memory has a word of bits behind its stack words, one for each item that could
//! not be read, and then a room for each item. What an item did not read is whatever was in the ring
//! before: nothing of it is looked at unless the item's bit is clear, nor anything behind the end of a
//! text.

use super::BuildError;
use super::cells::{Malformed, Spread, word};
use crate::Gva;
use crate::fetch::{Fetched, Read, TextHeader};

/// The most items of one record: the bits of their word.
const ITEMS_MAX: usize = 32;

/// Memory that is read at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetching {
    /// What reads it.
    pub readers: Readers,
    /// What is read.
    pub items: Vec<Fetched>,
}

/// Code of the guest's kernel that loads from memory and lives through a fault.
///
/// Each is called with an address in RAX. It makes RDX what is there, with zeros above, and RAX zero; or
/// RAX something else and RDX zero, when nothing is there (`bad_get_user` in arch/x86/lib/getuser.S). It
/// leaves all other registers as they are but for the arithmetic flags and AC, which it may clear. They
/// are in the order of their sizes: 1, 2, 4 and 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readers {
    /// Those for addresses of the kernel's half.
    pub kernel: [Gva; 4],
    /// Those for addresses of a process.
    pub process: [Gva; 4],
    /// Where the kernel's half begins.
    pub kernel_half: Gva,
    /// Where the addresses end that a process may have (`TASK_SIZE_MAX`): a page before the end of
    /// what the processor takes for addresses.
    pub process_end: Gva,
    /// Displacement, relative to the base of GS and sign-extended, of the pointer to the current task.
    pub current: u32,
    /// Offset in the task of `pagefault_disabled` (i32): while that is not zero, a fault on a page of the
    /// process ends at once.
    pub disabled: i32,
}

/// Where the items are in a record, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rooms {
    /// The word of bits.
    unread: usize,
    rooms: Vec<Room>,
    end: usize,
}

/// The room of an item: its first word, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) first: usize,
    pub(super) words: usize,
    read: Read,
}

impl Room {
    /// Offset in a record of its byte `at`.
    pub(super) fn offset(self, at: usize) -> usize {
        Spread::Cells.offset(self.first + at / 8) + at % 8
    }
}

impl Rooms {
    /// Rooms for `items`, from the word `first` on.
    pub(super) fn new(first: usize, items: &[Fetched]) -> Result<Self, BuildError> {
        if items.len() > ITEMS_MAX {
            return Err(BuildError::TooManyItems { count: items.len() });
        }
        let mut end = first + 1;
        let rooms = items.iter().map(|item| {
            let words = match item.read {
                Read::Bytes(len) => usize::from(len).div_ceil(8),
                // One byte more at least, by which a text that ends there is told from a longer one.
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

    /// The word that follows.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// The room of the item `index`, if the record has it and could read it.
    fn room(&self, record: &[u8], index: usize) -> Result<Option<Room>, Malformed> {
        let unread = word(record, self.unread())?;
        let room = self.rooms.get(index).copied();
        Ok(room.filter(|_| unread >> index & 1 == 0))
    }

    /// Copies what the item `index` read to `into`, if it could.
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

    /// Copies the text that the item `index` read to the front of `into`, if it could.
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

    /// Copies the bytes from `at` on, as far as there are words.
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
