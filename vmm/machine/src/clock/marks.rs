//! Which records of a virtual CPU are older than which of its hits that took an exit.
//!
//! Where the guest's counter stalls, the time of a record can be off by more than lies between it and a
//! hit that took an exit. But each such hit sees how far the ring had been reserved by then: what its
//! virtual CPU has recorded before that is older, everything behind it is younger. Of hits with nothing
//! recorded between them the first and the last tell all that.
//!
//! Invariants: one thread notes, and waits for nobody; who reads sees only marks that were complete
//! and have not been written over meanwhile; between the bounds that are told lies the truth, whatever
//! was forgotten.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// How many are kept: more than records wait in a ring mostly.
const KEPT: usize = 1 << 10;

/// Hits that took exits, with nothing recorded between them.
#[derive(Debug, Default)]
struct Mark {
    /// The first position that was not reserved at any of them.
    head: AtomicU64,
    first_ns: AtomicU64,
    last_ns: AtomicU64,
}

/// The newest marks of one virtual CPU.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// How many there ever were. A mark is written before it is counted.
    written: AtomicU64,
    /// That of number `n` is in the place `n` modulo [`KEPT`].
    places: OnceLock<Box<[Mark]>>,
}

impl Marks {
    fn places(&self) -> &[Mark] {
        let new = || (0..KEPT).map(|_| Mark::default()).collect();
        self.places.get_or_init(new)
    }

    /// Makes room, so that [`Marks::note`] does not allocate.
    pub(crate) fn prepare(&self) {
        self.places();
    }

    fn place(&self, number: u64) -> Option<&Mark> {
        let places = self.places();
        // The remainder is less than there are places.
        places.get(usize::try_from(number).ok()? % places.len().max(1))
    }

    /// A hit at `ns` found the ring's head at `head`. Of one thread.
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
        // A reader that sees some of what follows sees that what it looks for was given up.
        fence(Ordering::Release);
        place.head.store(head, Ordering::Relaxed);
        place.first_ns.store(ns, Ordering::Relaxed);
        place.last_ns.store(ns, Ordering::Relaxed);
        self.written
            .store(written.wrapping_add(1), Ordering::Release);
    }

    /// The first number that is surely not being written over, when `written` are there.
    fn oldest(written: u64) -> u64 {
        written.saturating_sub(KEPT as u64 - 1)
    }

    /// `ns` as it can be for what was recorded at `position`: between the hits before and behind it.
    pub(crate) fn between(&self, position: u64, ns: u64) -> u64 {
        let written = self.written.load(Ordering::Acquire);
        let is_behind = |number: u64| {
            let head = self.place(number).map(|mark| &mark.head);
            // Where a head was moved by the guest, any answer will do.
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
