//! What is held of a machine's events for clients that come back.
//!
//! Invariants: it never takes more than [`HELD`] bytes, whoever comes; what is held is without a gap, up to
//! the newest event.

use std::collections::VecDeque;

use super::encoded::Encoded;
use super::position::Position;

/// Bytes of batches that are held of one machine: some 35,000 hits with all their registers.
pub(crate) const HELD: usize = 8 << 20;
/// Bytes that are held of one that has ended.
pub(crate) const HELD_OF_ENDED: usize = 1 << 20;

/// The newest batches of one machine.
#[derive(Debug, Default)]
pub(crate) struct Held {
    batches: VecDeque<Batch>,
    weight: usize,
}

#[derive(Debug)]
struct Batch {
    /// The number of its first event.
    first: u64,
    encoded: Encoded,
}

impl Held {
    /// Holds a batch, whose first event is the number `first`; the oldest ones go for it.
    pub(crate) fn push(&mut self, first: u64, encoded: Encoded) {
        let newest = self.batches.back().map(|batch| batch.encoded.end.seq);
        if newest.is_some_and(|end| end != first) {
            self.clear();
        }
        self.weight += encoded.weight();
        self.batches.push_back(Batch { first, encoded });
        self.shrink(HELD);
    }

    /// Lets the oldest go, until the rest is within `limit`.
    pub(crate) fn shrink(&mut self, limit: usize) {
        while self.weight > limit
            && let Some(oldest) = self.batches.pop_front()
        {
            self.weight -= oldest.encoded.weight();
        }
    }

    /// Lets all go.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// What there is from the number `seq` on, in a stream that ends at `end`, and how many events are
    /// missing before it.
    pub(crate) fn since(&self, seq: u64, end: Position) -> (VecDeque<Encoded>, u64) {
        let first = self.batches.front().map_or(end.seq, |batch| batch.first);
        let seen = self
            .batches
            .partition_point(|batch| batch.encoded.end.seq <= seq);
        let unseen = self.batches.range(seen..).map(|batch| {
            let skipped = seq.saturating_sub(batch.first);
            batch.encoded.clone().without(skipped)
        });
        (unseen.collect(), first.saturating_sub(seq))
    }

    /// Bytes of what is held.
    pub(crate) fn weight(&self) -> usize {
        self.weight
    }
}
