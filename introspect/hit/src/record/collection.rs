//! The part of the ring's reader that a machine's collector and its control side share.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_arch::mem::PhysMemory;

use super::reader::{Look, Reader};
use super::source::{Stamp, When};
use crate::event::{Drained, Event, Headroom, in_order};
use crate::region::RingPlace;

/// Maximum time that a record waits to be read.
const DEADLINE: Duration = Duration::from_millis(5);
/// Interval between reads of the counters that detours increment for hits without a record.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// What a machine's collector and its control side share: the reader of the ring, and the events that the control
/// side has read and the collector has not taken.
#[derive(Debug)]
pub struct Collection {
    place: RingPlace,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    reader: Reader,
    waiting: VecDeque<Event>,
    lost: u64,
    settled: Option<Instant>,
}

impl Collection {
    /// Creates a collection of the records that `reader` reads.
    #[must_use]
    pub fn new(reader: Reader) -> Self {
        let place = reader.place();
        let state = State {
            reader,
            waiting: VecDeque::new(),
            lost: 0,
            settled: None,
        };
        Self {
            place,
            state: Mutex::new(state),
        }
    }

    /// Returns how much room detours find in the ring now. Takes no lock.
    #[must_use]
    pub fn room(&self, mem: &dyn PhysMemory) -> Headroom {
        self.place.room(mem).unwrap_or(Headroom::None)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads and counts all records that are finished by now. The collector gets their events with the next
    /// [`Collection::drain`]. At most as many events are kept as the ring has cells; further events are counted as
    /// lost.
    pub fn catch_up(&self, mem: &dyn PhysMemory, when: impl Fn(Stamp) -> When) {
        self.lock().catch_up(mem, when);
    }

    /// Like [`Collection::catch_up`], for a guest that will not run again: records that were begun but not finished
    /// count as lost.
    pub fn end(&self, mem: &dyn PhysMemory, when: impl Fn(Stamp) -> When) {
        let mut state = self.lock();
        state.catch_up(mem, when);
        let given_up = state.reader.give_up(mem);
        state.lost = state.lost.saturating_add(given_up);
    }

    /// Appends at most `most` events to `batch`, as [`Source::drain`](crate::event::Source::drain) does. Hits
    /// without an event count as lost.
    pub fn drain(
        &self,
        mem: &dyn PhysMemory,
        when: impl Fn(Stamp) -> When,
        batch: &mut Vec<Event>,
        most: usize,
    ) -> Drained {
        let mut state = self.lock();
        let waiting = state.waiting.len().min(most);
        batch.extend(state.waiting.drain(..waiting));
        if state.waiting.is_empty() {
            // After a backlog, the queue may be large.
            state.waiting = VecDeque::new();
        }
        let now = Instant::now();
        let look = Look::patient(most - waiting, now);
        let mut drained = state.reader.read(mem, when, look, batch);
        drained.more |= !state.waiting.is_empty();
        let lost = &mut drained.lost;
        let is_settled = |last| now.saturating_duration_since(last) <= SETTLE;
        if !state.settled.is_some_and(is_settled) {
            state.settled = Some(now);
            *lost = lost.saturating_add(state.reader.settle(mem));
        }
        *lost = lost.saturating_add(std::mem::take(&mut state.lost));
        drained
    }

    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.lock().waiting.capacity()
    }

    /// Returns how long the ring may stay unread; `None` while nothing records.
    #[must_use]
    pub fn patience(&self) -> Option<Duration> {
        let state = self.lock();
        if state.reader.records() {
            Some(DEADLINE)
        } else {
            // A task may still finish a record of a probe that has left.
            state.reader.awaits().then_some(SETTLE)
        }
    }
}

impl State {
    fn catch_up(&mut self, mem: &dyn PhysMemory, when: impl Fn(Stamp) -> When) {
        let most = self.reader.capacity();
        let mut read = Vec::new();
        let look = Look::at_all(most);
        let lost = self.reader.read(mem, when, look, &mut read).lost;
        let lost = lost.saturating_add(self.reader.settle(mem));
        let room = most.saturating_sub(self.waiting.len());
        let dropped = read.len().saturating_sub(room) as u64;
        self.lost = self.lost.saturating_add(lost).saturating_add(dropped);
        self.waiting.extend(read.into_iter().take(room));
        // Events of records that were finished late belong before events that already wait.
        in_order(self.waiting.make_contiguous());
    }
}
