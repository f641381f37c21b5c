//! Which cells of the ring are taken, and where detours may continue to reserve.
//!
//! Positions only ever grow, and position `p` is cell `p % capacity`. Any time may pass between reserving cells and
//! finishing the record in them. Until then, the cells are given to no other writer, even after many laps of the
//! ring. So the ring is a circle with obstacles:
//!
//! ```text
//!        read │ held │ read      │ held │ read   │ unread │ free               │ held, a lap later
//!   ──────────┴──────┴───────────┴──────┴────────┴────────┴────────────────────┴──────▶ position
//!                                                next     head                 limit
//! ```
//!
//! Detours reserve up to the next obstacle. When the head comes near it, the reader moves the head past an obstacle
//! that has more room after it, as if the reader had reserved all cells up to there.

use std::ops::Range;

/// The held cells of the ring: reserved, but not read in their turn.
#[derive(Debug)]
pub(super) struct HeldCells {
    capacity: u64,
    /// Held pieces, in the order of their positions. No two have a cell in common.
    held: Vec<Range<u64>>,
}

/// A run of free cells, in which detours can reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first free position, at the head or beyond.
    pub(super) from: u64,
    /// Number of free cells there.
    pub(super) len: u64,
}

impl Run {
    /// Returns the position that no reservation may pass.
    pub(super) fn limit(self) -> u64 {
        self.from.wrapping_add(self.len)
    }
}

impl HeldCells {
    /// Creates an empty set of held cells, for a ring of `capacity` cells, a power of two.
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity.into(),
            held: Vec::new(),
        }
    }

    /// Returns whether nothing is held.
    pub(super) fn is_clear(&self) -> bool {
        self.held.is_empty()
    }

    /// Returns the number of held pieces.
    pub(super) fn pieces(&self) -> u64 {
        self.held.len() as u64
    }

    /// Returns the number of held cells.
    pub(super) fn cells(&self) -> u64 {
        let cells = self
            .held
            .iter()
            .map(|piece| piece.end.wrapping_sub(piece.start));
        cells.sum()
    }

    /// Holds `piece`, which lies after everything that is held.
    pub(super) fn hold(&mut self, piece: Range<u64>) {
        match self.held.last_mut() {
            Some(last) if last.end == piece.start => last.end = piece.end,
            _ if piece.start == piece.end => {}
            _ => self.held.push(piece),
        }
    }

    /// Takes out everything that is held, to be checked and [held](Self::hold) again in the same order.
    pub(super) fn take(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.held)
    }

    /// Returns the run of free cells at the head, and the longest run of free cells. `unread` ends at the head, and
    /// contains nothing that is held.
    pub(super) fn runs(&self, unread: &Range<u64>) -> [Run; 2] {
        let head = unread.end;
        let pieces = self.held.iter().chain([unread]);
        let mut taken: Vec<(u64, u64)> = pieces
            .filter(|piece| piece.start != piece.end)
            .map(|piece| {
                // Distance from the head to the position at which the piece's cells come again.
                let ahead = piece.start.wrapping_sub(head) & (self.capacity - 1);
                (ahead, ahead + piece.end.wrapping_sub(piece.start))
            })
            .collect();
        taken.sort_unstable();
        let here = taken.first().map_or(self.capacity, |piece| piece.0);
        let run = |from: u64, to: u64| Run {
            from: head.wrapping_add(from),
            len: to.saturating_sub(from),
        };
        // The last run ends where the first piece comes again.
        let ends = taken.iter().skip(1).map(|piece| piece.0);
        let ends = ends.chain([self.capacity + here]);
        let behind = taken.iter().zip(ends).map(|(piece, end)| run(piece.1, end));
        let here = run(0, here);
        let longest = behind.fold(
            here,
            |longest, run| {
                if run.len > longest.len { run } else { longest }
            },
        );
        [here, longest]
    }
}
