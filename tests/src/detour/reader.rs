//! The reading end of a ring, as the host has it.

use std::sync::atomic::Ordering;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{CELL, Header, Malformed, Ring};

use super::arena::Arena;

/// Reads a ring, alone.
#[derive(Debug)]
pub struct Reader<'a> {
    arena: &'a Arena,
    ring: Ring,
    tail: u64,
}

impl<'a> Reader<'a> {
    /// A reader from where the ring was read up to.
    #[must_use]
    pub fn new(arena: &'a Arena, ring: Ring) -> Self {
        let tail = arena.tail(&ring);
        Self { arena, ring, tail }
    }

    /// The next record's bytes, if it is there, with its header.
    ///
    /// # Errors
    /// When what is there is no record.
    pub fn next_record(&mut self) -> Result<Option<(Header, Vec<u8>)>, Malformed> {
        let first = self.cell(self.tail);
        if self.arena.word(first).load(Ordering::Acquire) == 0 {
            return Ok(None);
        }
        let header = Header::read(&self.arena.read(first, CELL))?;
        let bytes = self.arena.read(first, CELL * usize::from(header.cells));
        for index in 0..u64::from(header.cells) {
            let cell = first.wrapping_add(index * CELL as u64);
            self.arena.word(cell).store(0, Ordering::Relaxed);
        }
        self.tail += u64::from(header.cells);
        self.arena.tell(&self.ring, self.tail);
        Ok(Some((header, bytes)))
    }

    /// Where a record at `position` begins.
    fn cell(&self, position: u64) -> Gva {
        let index = position % u64::from(self.ring.capacity);
        self.ring.cells.wrapping_add(index * CELL as u64)
    }
}
