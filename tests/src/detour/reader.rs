//! Reads a ring as the host does.

use std::sync::atomic::Ordering;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{CELL, Header, Malformed, Ring};

use super::arena::Arena;

/// The only reader of a ring.
#[derive(Debug)]
pub struct Reader<'a> {
    arena: &'a Arena,
    ring: Ring,
    tail: u64,
}

impl<'a> Reader<'a> {
    /// Creates a reader that starts at the ring's published tail.
    #[must_use]
    pub fn new(arena: &'a Arena, ring: Ring) -> Self {
        let tail = arena.tail(&ring);
        Self { arena, ring, tail }
    }

    /// Takes the next record, if it is finished; returns its header and bytes.
    ///
    /// # Errors
    /// When the bytes at the tail are not a record.
    ///
    /// # Panics
    /// When a cell of the record other than the first has a mark, or the record belongs to another position.
    pub fn next_record(&mut self) -> Result<Option<(Header, Vec<u8>)>, Malformed> {
        let first = self.cell(self.tail);
        let mark = self.arena.word(first).load(Ordering::Acquire);
        let header = match Header::of_mark(mark) {
            Err(Malformed::Unfinished) => return Ok(None),
            header => header?,
        };
        assert!(header.is_at(self.tail), "{header:?} at {}", self.tail);
        let bytes = self.arena.read(first, CELL * usize::from(header.cells));
        for cell in bytes.chunks(CELL).skip(1) {
            assert_eq!(cell[..8], [0; 8], "a mark inside a record");
        }
        self.arena.word(first).store(0, Ordering::Relaxed);
        self.tail += u64::from(header.cells);
        self.arena.publish_tail(&self.ring, self.tail);
        Ok(Some((header, bytes)))
    }

    /// Returns all finished records between the tail and the head, including those after an unfinished one. Leaves
    /// them in the ring.
    #[must_use]
    pub fn finished(&self) -> Vec<(Header, Vec<u8>)> {
        let head = self.arena.word(self.ring.head).load(Ordering::SeqCst);
        let mut records = Vec::new();
        let mut position = self.tail;
        while position < head {
            let cell = self.cell(position);
            let mark = self.arena.word(cell).load(Ordering::Acquire);
            match Header::of_mark(mark) {
                Ok(header) if header.is_at(position) => {
                    let len = CELL * usize::from(header.cells);
                    records.push((header, self.arena.read(cell, len)));
                    position += u64::from(header.cells);
                }
                _ => position += 1,
            }
        }
        records
    }

    /// Returns the address of the cell at `position`.
    fn cell(&self, position: u64) -> Gva {
        let index = position % u64::from(self.ring.capacity);
        self.ring.cells.wrapping_add(index * CELL as u64)
    }
}
