//! What a machine's collector and its control side share of the ring.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_arch::mem::PhysMemory;

use super::reader::{Look, Reader};
use super::source::{Stamp, When};
use crate::event::{Drained, Event, Room, in_order};
use crate::region::RingPlace;

/// The longest that a record waits to be read.
const DEADLINE: Duration = Duration::from_millis(5);
/// How often counters are looked at that the guest only increments.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// What a machine's collector and its control side share of the ring: the reader, and the events
/// that the control side has read before the collector came to it.
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
    /// A collection of what `reader` reads.
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

    /// How much room detours find in the ring now. Takes no lock.
    #[must_use]
    pub fn room(&self, mem: &dyn PhysMemory) -> Room {
        self.place.room(mem).unwrap_or(Room::None)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads and accounts for everything that has been recorded up to now; the collector gets it
    /// with the next [`Collection::drain`]. What no room is left for in one ring's worth of events
    /// is read but lost.
    pub fn catch_up(&self, mem: &dyn PhysMemory, when: impl Fn(Stamp) -> When) {
        self.lock().catch_up(mem, when);
    }

    /// The same when the guest will not run again: what it has begun to record is lost.
    pub fn end(&self, mem: &dyn PhysMemory, when: impl Fn(Stamp) -> When) {
        let mut state = self.lock();
        state.catch_up(mem, when);
        let given_up = state.reader.give_up(mem);
        state.lost = state.lost.saturating_add(given_up);
    }

    /// Appends at most `most` events to `batch`, as [`Source::drain`](crate::event::Source::drain) does. Lost are hits that
    /// left none.
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
            // What was there at a bad moment may have been much.
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

    /// How long the ring may be left alone; `None` while nothing records.
    #[must_use]
    pub fn patience(&self) -> Option<Duration> {
        let state = self.lock();
        if state.reader.records() {
            Some(DEADLINE)
        } else {
            // Whoever still has a record to finish of a probe that has left.
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
        // What was finished late comes before what waits already.
        in_order(self.waiting.make_contiguous());
    }
}
