//! Events of a machine that are held for reconnecting clients.
//!
//! Invariants: the number of held bytes is limited, and does not depend on the number of clients; the held batches
//! have no gap between them, and the last one has the newest event.

use std::collections::VecDeque;

use super::encoded::Encoded;
use super::position::Position;

/// Maximum number of bytes of the batches that are held for one machine: about 35,000 hits with all their
/// registers.
pub(crate) const HELD: usize = 8 << 20;
/// Maximum number of bytes that are held for a machine that has ended.
pub(crate) const HELD_OF_ENDED: usize = 1 << 20;

/// The newest batches of one machine.
#[derive(Debug, Default)]
pub(crate) struct Held {
    batches: VecDeque<Batch>,
    weight: usize,
}

#[derive(Debug)]
struct Batch {
    /// Number of its first event.
    first: u64,
    encoded: Encoded,
}

impl Held {
    /// Holds a batch whose first event has the number `first`, and drops the oldest batches until at most `limit`
    /// bytes are left. Drops all older batches if events are missing between them and this one.
    pub(crate) fn push(&mut self, first: u64, encoded: Encoded, limit: usize) {
        let newest = self.batches.back().map(|batch| batch.encoded.end.seq);
        if newest.is_some_and(|end| end != first) {
            self.clear();
        }
        self.weight += encoded.weight();
        self.batches.push_back(Batch { first, encoded });
        self.shrink(limit);
    }

    /// Drops the oldest batches until at most `limit` bytes are left.
    pub(crate) fn shrink(&mut self, limit: usize) {
        while self.weight > limit
            && let Some(oldest) = self.batches.pop_front()
        {
            self.weight -= oldest.encoded.weight();
        }
    }

    /// Drops all batches.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the held events from the number `seq` on, and the number of events from `seq` on that are no longer
    /// held. `end` is the position after the machine's newest event.
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

    /// Returns the bytes of all held batches.
    pub(crate) fn weight(&self) -> usize {
        self.weight
    }
}
