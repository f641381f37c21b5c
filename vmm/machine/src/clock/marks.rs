//! Marks, which order a vCPU's records and those of its hits that took an exit.
//!
//! Where the guest's counter stalls, a record's time can be so wrong that it is on the other side of a hit that
//! took an exit. But at each such hit, the ring's head shows how far the ring was reserved. The vCPU's records
//! before that position were reserved earlier, and all others later. Of hits with nothing recorded between them,
//! only the first and the last matter.
//!
//! Invariants: one thread writes marks, and never waits. A reader uses only marks that are complete and have not
//! been overwritten meanwhile. The time of a record's reservation lies within the bounds that the marks give, even
//! after older marks have been overwritten.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Number of marks to keep. It is mostly more than the number of records that wait in a ring.
const KEPT: usize = 1 << 10;

/// Hits that took exits, with nothing recorded between them.
#[derive(Debug, Default)]
struct Mark {
    /// First ring position that was not reserved at any of the hits.
    head: AtomicU64,
    /// Time of the first of the hits.
    first_ns: AtomicU64,
    /// Time of the last of the hits.
    last_ns: AtomicU64,
}

/// The newest marks of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Number of marks ever written. Each is counted after it is complete.
    written: AtomicU64,
    /// Mark `n` is at index `n` modulo [`KEPT`].
    places: OnceLock<Box<[Mark]>>,
}

impl Marks {
    fn places(&self) -> &[Mark] {
        let new = || (0..KEPT).map(|_| Mark::default()).collect();
        self.places.get_or_init(new)
    }

    /// Allocates the marks, so that [`Marks::note`] does not.
    pub(crate) fn prepare(&self) {
        self.places();
    }

    fn place(&self, number: u64) -> Option<&Mark> {
        let places = self.places();
        // The remainder is less than the number of places.
        places.get(usize::try_from(number).ok()? % places.len().max(1))
    }

    /// Notes a hit at `ns` that found the ring's head at `head`. Only one thread may call this.
    pub(crate) fn note(&self, head: u64, ns: u64) {
        let written = self.written.load(Ordering::Relaxed);
        let newest = written.checked_sub(1).and_then(|last| self.place(last));
        if let Some(newest) = newest
            && newest.head.load(Ordering::Relaxed) == head
        {
            newest.last_ns.store(ns, Ordering::Relaxed);
            return;
        }
        let Some(place) = self.place(written) else {
            return;
        };
        // A reader that sees any of these stores also sees a value of `written` for which the overwritten mark is
        // too old.
        fence(Ordering::Release);
        place.head.store(head, Ordering::Relaxed);
        place.first_ns.store(ns, Ordering::Relaxed);
        place.last_ns.store(ns, Ordering::Relaxed);
        self.written
            .store(written.wrapping_add(1), Ordering::Release);
    }

    /// Returns the number of the oldest mark that is not being overwritten, if `written` marks are counted.
    fn oldest(written: u64) -> u64 {
        written.saturating_sub(KEPT as u64 - 1)
    }

    /// Returns `ns`, limited to the times that are possible for a record at `position`: between the hit before and
    /// the hit after it.
    pub(crate) fn between(&self, position: u64, ns: u64) -> u64 {
        let written = self.written.load(Ordering::Acquire);
        let is_behind = |number: u64| {
            let head = self.place(number).map(|mark| &mark.head);
            // If the guest has moved a head, any answer is right.
            head.is_some_and(|head| {
                head.load(Ordering::Relaxed)
                    .wrapping_sub(position)
                    .cast_signed()
                    > 0
            })
        };
        let (mut from, mut to) = (Self::oldest(written), written);
        while from < to {
            let middle = from.midpoint(to);
            if is_behind(middle) {
                to = middle;
            } else {
                from = middle + 1;
            }
        }
        let before = from.checked_sub(1).filter(|n| *n >= Self::oldest(written));
        let lowest = before.and_then(|n| Some(self.place(n)?.last_ns.load(Ordering::Relaxed)));
        let behind = Some(from).filter(|n| *n < written);
        let highest = behind.and_then(|n| Some(self.place(n)?.first_ns.load(Ordering::Relaxed)));
        fence(Ordering::Acquire);
        let oldest = Self::oldest(self.written.load(Ordering::Relaxed));
        if before.or(behind).is_none_or(|n| n < oldest) {
            return ns;
        }
        let lowest = lowest.map_or(0, |ns| ns.saturating_add(1));
        let highest = highest.map_or(u64::MAX, |ns| ns.saturating_sub(1));
        ns.max(lowest).min(highest)
    }
}

#[cfg(test)]
mod tests;
