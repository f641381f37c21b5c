//! One machine's events on their way to its clients.
//!
//! Invariants: the collector waits for no client, and does for one no more than its lists cost and a short filter, of
//! which it takes no more than [`SHORT_OF_ALL`] together; a batch is encoded
//! once for all clients, and not at all if there has been none for [`LINGER`]; what waits for one client never takes
//! more than [`WAITING`] bytes, and what waits for all clients of a server no more than their pool has; what a client
//! loses is counted for it alone; a client that comes back finds what is held, and no event twice.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Event;
use hvprobe_machine::queue::{Entrance, Pool, queue_in};
use hvprobe_machine::{Listen, ThrottleNotice};

use super::encoded::{Encoded, Encoder, OVERHEAD};
use super::held::{HELD_OF_ENDED, Held};
use super::position::{Lost, Position};
use super::subscription::{PASSING, Subscription};
use super::wanted::Wanted;

/// Bytes that wait for one client before it begins to lose events: some 30,000 hits with all their
/// registers.
const WAITING: usize = 8 << 20;
/// The comparisons of a filter that the collector may evaluate, so that what it leaves out takes no room in its client's
/// queue, and those of all such filters.
const SHORT: usize = 4;
const SHORT_OF_ALL: usize = 32;
/// How long batches are held for clients that come back when there is none.
const LINGER: Duration = Duration::from_secs(60);

/// The clients of one machine. Copies are the same.
#[derive(Clone, Debug)]
pub(crate) struct Broadcast {
    state: Arc<Mutex<State>>,
    /// Where what waits for them has its room.
    pool: Pool,
}

impl Default for Broadcast {
    fn default() -> Self {
        Self::within(Pool::new(usize::MAX))
    }
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    clients: Vec<Client>,
    encoder: Encoder,
    /// Behind the newest event.
    end: Position,
    held: Held,
    /// When there was a client last, if there ever was one.
    attended: Option<Instant>,
}

#[derive(Debug)]
struct Client {
    /// Its subscription has it.
    wanted: Weak<Wanted>,
    queue: Entrance<Encoded, Lost>,
    /// The comparisons of its filter, if the collector evaluates it.
    filters: usize,
    /// When it was told last where its stream is.
    told: Instant,
    /// Which events of a batch it wants.
    picked: Vec<usize>,
}

/// A position that the machine has not come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beyond;

impl Broadcast {
    /// For clients that have no more waiting for them, together with others of `pool`, than that has.
    pub(crate) fn within(pool: Pool) -> Self {
        Self {
            state: Arc::default(),
            pool,
        }
    }

    /// The events that are `wanted`, from now on or from the position `after` on, as far as they are held.
    pub(crate) fn subscribe(
        &self,
        wanted: impl Into<Arc<Wanted>>,
        after: Option<Position>,
    ) -> Result<Subscription, Beyond> {
        let (into, from) = queue_in(&self.pool, WAITING);
        let wanted = wanted.into();
        let now = Instant::now();
        let mut state = self.state();
        let end = state.end;
        if !after.is_none_or(|after| after.is_within(end)) {
            return Err(Beyond);
        }
        let (held, missed) = match after {
            Some(after) => state.held.since(after.seq, end),
            None => (VecDeque::new(), 0),
        };
        let before = after.unwrap_or(end);
        // Without its other end a queue ends.
        if !state.closed {
            // Those that have left are not noticed while there are no events.
            state.clients.retain(|client| !client.queue.is_abandoned());
            let others: usize = state.clients.iter().map(|client| client.filters).sum();
            let filters = wanted.comparisons();
            let is_short = filters <= SHORT && others + filters <= SHORT_OF_ALL;
            state.clients.push(Client {
                wanted: Arc::downgrade(&wanted),
                queue: into,
                filters: if is_short { filters } else { 0 },
                told: now,
                picked: Vec::new(),
            });
            state.attended = Some(now);
        }
        Ok(Subscription {
            wanted,
            start: Position {
                seq: before.seq + missed,
                dropped: end.dropped,
            },
            missed,
            dropped: end.dropped - before.dropped,
            held,
            queue: from,
            told: now,
        })
    }

    /// Bytes that are held of it for clients that come back.
    pub(crate) fn held_bytes(&self) -> usize {
        self.state().held.weight()
    }

    /// What takes events up for the clients. When it goes, their streams end.
    pub(crate) fn listener(&self) -> Listener {
        Listener(self.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn hear(&mut self, events: &[Event], dropped: u64) {
        let start = Position {
            seq: events.first().map_or(self.end.seq, |first| first.seq),
            dropped: self.end.dropped.saturating_add(dropped),
        };
        self.end = Position {
            seq: start.seq.saturating_add(events.len() as u64),
            ..start
        };
        self.clients.retain(|client| !client.queue.is_abandoned());
        let now = Instant::now();
        if !self.clients.is_empty() {
            self.attended = Some(now);
        }
        let is_attended = self
            .attended
            .is_some_and(|last| now.duration_since(last) < LINGER);
        if !is_attended {
            self.held.clear();
            return;
        }
        for client in &mut self.clients {
            client.lose(dropped, start);
        }
        if events.is_empty() {
            for client in &mut self.clients {
                client.queue.tell();
            }
            return;
        }
        let all = self.encoder.all(events, self.end);
        for client in &mut self.clients {
            client.hear(events, &all, &mut self.encoder, now);
        }
        self.held.push(start.seq, all);
    }
}

impl Client {
    fn lose(&mut self, count: u64, until: Position) {
        self.queue.lose(Lost { count, until });
    }

    /// Takes up what its lists, and a short filter, want of `events`, which `encoder` has just made `all` of.
    fn hear(&mut self, events: &[Event], all: &Encoded, encoder: &mut Encoder, now: Instant) {
        let Some(wanted) = self.wanted.upgrade() else {
            return;
        };
        let is_filtered = self.filters > 0;
        let takes_all = wanted.lists_all() && !is_filtered;
        let encoded = if takes_all {
            all.clone()
        } else {
            self.picked.clear();
            let listed = events.iter().enumerate();
            let takes = |event: &Event| match is_filtered {
                true => wanted.has(&event.into()),
                false => wanted.lists(&event.into()),
            };
            let listed = listed.filter(|(_, event)| takes(event));
            self.picked.extend(listed.map(|(index, _)| index));
            if self.picked.is_empty() {
                return self.pass_by(all.end, now);
            }
            if !self.queue.is_taking() {
                return self.lose(self.picked.len() as u64, all.end);
            }
            encoder.some(events, &self.picked, all.end)
        };
        let count = match takes_all {
            true => events.len(),
            false => self.picked.len(),
        };
        let weight = encoded.weight();
        match self.queue.put(encoded, weight) {
            Ok(()) => self.told = now,
            Err(_) => self.lose(count as u64, all.end),
        }
    }

    /// No event until `end` was one of its own.
    fn pass_by(&mut self, end: Position, now: Instant) {
        if now.duration_since(self.told) >= PASSING && self.queue.is_taking() {
            self.told = now;
            let nothing = Encoded {
                end,
                ..Encoded::default()
            };
            // If there is no room, the next one that it gets says it.
            let _ = self.queue.put(nothing, OVERHEAD);
        } else {
            self.queue.tell();
        }
    }
}

/// The end of a [`Broadcast`] that hears of events.
#[derive(Debug)]
pub(crate) struct Listener(Broadcast);

impl Listen for Listener {
    fn hear(&mut self, events: &[Event], dropped: u64) -> bool {
        self.0.state().hear(events, dropped);
        true
    }

    fn note(&mut self, notices: &[ThrottleNotice]) {
        for client in &mut self.0.state().clients {
            let Some(wanted) = client.wanted.upgrade() else {
                continue;
            };
            let wants = |notice: &&ThrottleNotice| wanted.has_probe(notice.throttled.probe.0);
            client.queue.note(notices.iter().filter(wants));
            client.queue.tell();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.closed = true;
        state.clients.clear();
        state.held.shrink(HELD_OF_ENDED);
    }
}

#[cfg(test)]
mod tests;
