//! The order in which events are delivered.
//!
//! A pass of the collector sees the events that exist at one moment. Events that become visible later may be older:
//! the time of a hit is read before its event is queued, and sources are read before rings. So a pass holds the
//! events that are newer than all events of earlier passes. It delivers the others, because events older than these
//! had a whole pass to arrive.
//!
//! ```text
//!   seen by passes before        seen by this one only
//!   ───────────────── horizon ──────────────────────── newest ──▶ time
//!       delivered         │        held
//! ```
//! A pass does not hold events for this reason in three cases: no event has come since the last pass; only one ring
//! can have events; a ring or the list of held events is so full that events would be lost. Held events of a ring
//! stay in the ring.
//!
//! A vCPU's thread may be preempted during a hit, before it has queued the event. So it signals when a hit begins
//! and when it ends. When a pass first sees that a hit has begun, events that are newer than the horizon of the
//! pass before it are held until the hit ends.
//!
//! Invariant: events are delivered in order of time. The only exception is an event that becomes visible more than
//! a pass after its time, and not because of a long hit. An event whose time is not known stays after the events
//! that it is known to follow.

use rtrb::Consumer;
use rtrb::chunks::ReadChunk;

use super::source::{Drained, Sink};
use super::value::Event;

/// Maximum number of events that are delivered at a time. A pass takes about this number of events from all rings
/// and sources together, but at least one from each.
pub(super) const BATCH: usize = 1024;
/// Maximum number of held events outside the rings. If there are more, the pass does not hold events.
const CROWD: usize = 8 * BATCH;

/// The result of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassResult {
    Nothing,
    /// There may be more events to take.
    Part,
    /// Some events are held: there must be another pass soon.
    Held,
    /// Everything was delivered.
    All {
        of_rings: bool,
    },
}

/// Times of the oldest and the newest event that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) oldest: u64,
    pub(super) newest: u64,
}

/// Events that have not been delivered yet.
#[derive(Debug)]
pub(super) struct Order {
    rings: Vec<Consumer<Event>>,
    /// Number of events that each ring held after the last pass.
    left: Vec<usize>,
    /// Events that do not lie in rings, in order of time.
    pending: Vec<Event>,
    /// Time of the newest event that any pass has seen.
    horizon: u64,
    /// The horizon before the last pass.
    before: u64,
    /// State of each vCPU at the last pass.
    at_work: Vec<AtWork>,
    next_seq: u64,
}

/// Progress of a vCPU's hits.
#[derive(Clone, Copy, Debug, Default)]
struct AtWork {
    /// Number of beginnings and ends: odd during a hit.
    turns: u64,
    /// If the vCPU is in a hit, the time of the hit is later than this.
    since: u64,
}

/// One pass over all rings and sources.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    order: &'a mut Order,
    /// Maximum number of events to take from each ring or source.
    share: usize,
    newest: u64,
    /// Events newer than this are held, because a source still has events that may be older.
    behind: u64,
    /// Events newer than this are held, because a hit that has not ended may still make an older one.
    lasts: u64,
    rest: bool,
    keeps_back: bool,
    /// Whether all events are in rings: sources have none.
    rings_only: bool,
    is_quiet: bool,
    is_last: bool,
}

impl Order {
    pub(super) fn new(rings: Vec<Consumer<Event>>) -> Self {
        Self {
            left: vec![0; rings.len()],
            at_work: vec![AtWork::default(); rings.len()],
            rings,
            pending: Vec::with_capacity(BATCH),
            horizon: 0,
            before: 0,
            next_seq: 0,
        }
    }

    pub(super) fn rings_are_empty(&self) -> bool {
        self.rings.iter().all(Consumer::is_empty)
    }

    /// Returns the times of the events that are held between two passes. `None` if no event with a known time is
    /// held.
    pub(super) fn held(&mut self) -> Option<Held> {
        let mut held: Option<Held> = None;
        let mut add = |event: &Event| {
            let time = place(event);
            let Held { oldest, newest } = held.unwrap_or(Held {
                oldest: time,
                newest: time,
            });
            held = Some(Held {
                oldest: oldest.min(time),
                newest: newest.max(time),
            });
        };
        let is_known = |event: &&Event| place(event) > 0;
        self.pending.iter().filter(is_known).for_each(&mut add);
        for (ring, left) in self.rings.iter_mut().zip(&self.left) {
            if let Ok(chunk) = ring.read_chunk(*left) {
                events(&chunk).filter(is_known).for_each(&mut add);
            }
        }
        held
    }

    /// Begins a pass over the rings and over `sources` sources. `records` says whether a source can have events; if
    /// not, all events are in the rings. If `is_last` is set, no events follow, so no event waits for older ones.
    pub(super) fn pass(&mut self, sources: usize, records: bool, is_last: bool) -> Pass<'_> {
        Pass {
            share: (BATCH / (self.rings.len() + sources).max(1)).max(1),
            newest: self.horizon,
            behind: u64::MAX,
            lasts: u64::MAX,
            rest: false,
            keeps_back: false,
            rings_only: !records && self.pending.is_empty(),
            is_quiet: true,
            is_last,
            order: self,
        }
    }
}

impl Pass<'_> {
    /// Notes `turns`, the number of beginnings and ends of hits on `vcpu`. Must be called before the pass reads any
    /// source or ring.
    pub(super) fn look_at(&mut self, vcpu: usize, turns: u64) {
        let before = self.order.before;
        let Some(at_work) = self.order.at_work.get_mut(vcpu) else {
            return;
        };
        if at_work.turns != turns {
            // The hit began after the last pass checked this vCPU. By then, all events up to the horizon of that
            // pass had been seen.
            *at_work = AtWork {
                turns,
                since: before,
            };
        }
        if turns & 1 == 1 {
            self.lasts = self.lasts.min(at_work.since);
        }
    }

    /// Calls `drain` to append the events of one source to the pending events. Returns the number of events that
    /// the source has lost.
    pub(super) fn take(&mut self, drain: impl FnOnce(&mut Vec<Event>, usize) -> Drained) -> u64 {
        let pending = &mut self.order.pending;
        let before = pending.len();
        let drained = drain(pending, self.share);
        let new = pending.get(before..).unwrap_or_default();
        let newest = new.iter().map(place).max();
        if let Some(newest) = newest {
            self.newest = self.newest.max(newest);
            self.rings_only = false;
            self.is_quiet = false;
            if drained.more {
                self.behind = self.behind.min(newest);
            }
        }
        self.rest |= drained.more;
        self.keeps_back |= drained.keeps_back;
        drained.lost
    }

    /// Reads the rings and delivers the events that need not be held. Also reports the number of events that were
    /// `dropped`.
    pub(super) fn hand_on(mut self, dropped: u64, sink: &mut Sink) -> PassResult {
        let until = self.until();
        let (until, ready) = self.ready(until);
        let Order {
            rings,
            left,
            pending,
            horizon,
            before,
            next_seq,
            ..
        } = self.order;
        if !self.keeps_back {
            *before = std::mem::replace(horizon, self.newest);
        }
        let mut numbered = Numbered {
            next: next_seq,
            dropped,
            sink,
            is_something: false,
        };
        for (left, ready) in left.iter_mut().zip(&ready) {
            *left -= ready;
        }
        let mut filled = rings
            .iter_mut()
            .zip(&ready)
            .filter(|(_, ready)| **ready > 0);
        let (first, second) = (filled.next(), filled.next());
        let of_rings = first.is_some();
        match (first, second) {
            // Events that need not be merged with others are delivered from their place in the ring.
            (Some((ring, ready)), None) if pending.is_empty() => {
                if let Ok(mut chunk) = ring.read_chunk(*ready) {
                    let (events, wrapped) = chunk.as_mut_slices();
                    in_order(events);
                    numbered.hand_on(events);
                    in_order(wrapped);
                    numbered.hand_on(wrapped);
                    chunk.commit_all();
                }
            }
            (first, second) => {
                for (ring, ready) in first.into_iter().chain(second).chain(filled) {
                    pending.extend(ring.read_chunk(*ready).into_iter().flatten());
                }
                in_order(pending);
                let newer = |time: u64| time > until;
                let ready = pending.iter().map(times()).position(newer);
                let ready = ready.unwrap_or(pending.len());
                for batch in pending
                    .get_mut(..ready)
                    .unwrap_or_default()
                    .chunks_mut(BATCH)
                {
                    numbered.hand_on(batch);
                }
                pending.drain(..ready);
            }
        }
        let is_something = numbered.finish();
        let is_held = !pending.is_empty() || left.iter().any(|left| *left > 0);
        match (self.rest, is_held, is_something) {
            (true, ..) => PassResult::Part,
            (_, true, _) => PassResult::Held,
            (.., true) => PassResult::All { of_rings },
            _ => {
                // After a backlog, the buffer may be large.
                pending.shrink_to(BATCH);
                PassResult::Nothing
            }
        }
    }

    /// Returns the time up to which events can be delivered.
    fn until(&mut self) -> u64 {
        let mut is_crowded = self.order.pending.len() > CROWD;
        for (ring, left) in self.order.rings.iter_mut().zip(&mut self.order.left) {
            let there = ring.slots();
            self.is_quiet &= there == *left;
            *left = there;
            is_crowded |= there > ring.buffer().capacity() / 2;
            if let Ok(chunk) = ring.read_chunk(there)
                && let Some(last) = events(&chunk).last()
            {
                self.newest = self.newest.max(last.host_ns);
            }
        }
        let is_alone = self.rings_only && self.order.rings.len() == 1;
        let is_quiet = self.is_quiet && !self.rest && !self.keeps_back;
        let horizon = match is_alone || is_quiet || is_crowded || self.is_last {
            true => u64::MAX,
            false => self.order.horizon,
        };
        let lasts = match is_alone || is_crowded || self.is_last {
            true => u64::MAX,
            false => self.lasts,
        };
        horizon.min(lasts).min(self.behind)
    }

    /// Returns the time up to which events can be delivered, and the number of such events in each ring. The time
    /// is at most `until`. From each ring, at most a share is taken. If a ring has more events than that, events
    /// that are newer than the last event of its share must wait, so the time is earlier.
    fn ready(&mut self, mut until: u64) -> (u64, Vec<usize>) {
        let Order { rings, left, .. } = &mut *self.order;
        for (ring, left) in rings.iter_mut().zip(&*left) {
            if *left > self.share
                && let Ok(chunk) = ring.read_chunk(*left)
                && let Some(last) = events(&chunk).nth(self.share - 1)
                && last.host_ns <= until
            {
                until = last.host_ns;
                self.rest = true;
            }
        }
        let ready = rings.iter_mut().zip(&*left).map(|(ring, left)| {
            let chunk = ring.read_chunk((*left).min(self.share)).ok();
            let ready = |chunk| {
                events(chunk)
                    .take_while(|event| event.host_ns <= until)
                    .count()
            };
            chunk.as_ref().map_or(0, ready)
        });
        let ready = ready.collect();
        (until, ready)
    }
}

fn events<'c>(chunk: &'c ReadChunk<'_, Event>) -> impl DoubleEndedIterator<Item = &'c Event> {
    let (first, second) = chunk.as_slices();
    first.iter().chain(second)
}

/// Sorts `events` by time.
pub(crate) fn in_order(events: &mut [Event]) {
    if !events.is_sorted_by_key(times()) {
        // Stable: events of one instant on one vCPU keep their order. Each event is moved once.
        events.sort_by_cached_key(times());
    }
}

/// Returns a function that returns the time of an event. It must be called for one event after the other: an event
/// whose time is not known gets the lower bound for its time, or the time of the event before it if that is later.
fn times() -> impl FnMut(&Event) -> u64 {
    let mut last = 0;
    move |event| {
        last = match event.host_ns {
            0 => place(event).max(last),
            time => time,
        };
        last
    }
}

/// Returns the time of an event that has no number yet. If the time is not known, returns the lower bound for it; 0
/// if that is not known either.
fn place(event: &Event) -> u64 {
    match event.host_ns {
        0 => event.seq,
        time => time,
    }
}

/// Assigns numbers to events and delivers them.
struct Numbered<'a> {
    next: &'a mut u64,
    dropped: u64,
    sink: &'a mut Sink,
    is_something: bool,
}

impl Numbered<'_> {
    fn hand_on(&mut self, events: &mut [Event]) {
        if events.is_empty() {
            return;
        }
        for event in &mut *events {
            event.seq = *self.next;
            *self.next += 1;
        }
        (self.sink)(events, std::mem::take(&mut self.dropped));
        self.is_something = true;
    }

    /// Reports the dropped events, unless a batch has reported them. Returns whether anything was delivered or
    /// reported.
    fn finish(self) -> bool {
        if self.dropped > 0 {
            (self.sink)(&[], self.dropped);
        }
        self.is_something || self.dropped > 0
    }
}

#[cfg(test)]
mod tests;
