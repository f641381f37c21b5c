//! Sends one machine's events to its clients.
//!
//! Invariants:
//! - the collector waits for no client. For each client it only checks events against the client's lists (probes,
//!   processes, names, kinds) and against its filter if that is short; all these filters together have at most
//!   [`SHORT_OF_ALL`] comparisons;
//! - a batch is encoded once for all clients, and not at all if there has been no client for [`LINGER`];
//! - the events that wait for one client take at most [`WAITING`] bytes, and those that wait for all clients of
//!   a server at most the limit of their pool;
//! - losses are counted for each client separately;
//! - a client that reconnects gets the held events, and no event twice.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Event;
use hvprobe_machine::queue::{Entrance, Pool, queue_in};
use hvprobe_machine::{Listen, ThrottleNotice};

use super::encoded::{Encoded, Encoder, OVERHEAD};
use super::held::{HELD, HELD_OF_ENDED, Held};
use super::position::{Lost, Position};
use super::subscription::{PASSING, Subscription};
use super::wanted::Wanted;

/// Maximum number of bytes of events that wait for one client; further events are lost. About 30,000 hits with all
/// their registers.
const WAITING: usize = 8 << 20;
/// Maximum number of comparisons of a filter that the collector evaluates itself. Events that such a filter
/// excludes take no room in the client's queue.
const SHORT: usize = 4;
/// Maximum number of comparisons of all such filters together.
const SHORT_OF_ALL: usize = 32;
/// How long batches are held for reconnecting clients after the last client has left.
const LINGER: Duration = Duration::from_secs(60);

/// The clients of one machine. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Broadcast {
    state: Arc<Mutex<State>>,
    /// Pool with the room for the waiting events of all clients of the server.
    pool: Pool,
    limits: Limits,
}

/// Limits of one machine's events, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of the events that may wait for one client.
    pub(crate) waiting: usize,
    /// Bytes of the events that are held for reconnecting clients.
    pub(crate) held: usize,
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
    /// Position after the newest event.
    end: Position,
    held: Held,
    /// Last time that there was a client, if there ever was one.
    attended: Option<Instant>,
}

#[derive(Debug)]
struct Client {
    /// Owned by the client's subscription.
    wanted: Weak<Wanted>,
    queue: Entrance<Encoded, Lost>,
    /// Number of comparisons of its filter, if the collector evaluates it; otherwise 0.
    filters: usize,
    /// Last time that a batch was queued. Each batch carries the position of the stream.
    last_queued: Instant,
    /// Indexes of the events of the current batch that the client wants.
    picked: Vec<usize>,
}

/// The requested position is after the machine's newest event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beyond;

impl Broadcast {
    /// Creates a broadcast whose waiting events take their room from `pool`, which may be shared.
    pub(crate) fn within(pool: Pool) -> Self {
        Self {
            state: Arc::default(),
            pool,
            limits: Limits {
                waiting: WAITING,
                held: HELD,
            },
        }
    }

    /// Creates a broadcast that has other limits.
    #[cfg(test)]
    pub(crate) fn limited(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Subscribes to future events that are `wanted`. If `after` is given, the held events from that position on
    /// come first.
    pub(crate) fn subscribe(
        &self,
        wanted: impl Into<Arc<Wanted>>,
        after: Option<Position>,
    ) -> Result<Subscription, Beyond> {
        let (into, from) = queue_in(&self.pool, self.limits.waiting);
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
        // If the machine has ended, `into`, the entrance of the queue, is dropped, which ends the queue.
        if !state.closed {
            // While there are no events, clients that have left are noticed only here.
            state.clients.retain(|client| !client.queue.is_abandoned());
            let others: usize = state.clients.iter().map(|client| client.filters).sum();
            let filters = wanted.comparisons();
            let is_short = filters <= SHORT && others + filters <= SHORT_OF_ALL;
            state.clients.push(Client {
                wanted: Arc::downgrade(&wanted),
                queue: into,
                filters: if is_short { filters } else { 0 },
                last_queued: now,
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
            last_returned: now,
        })
    }

    /// Returns the bytes of the events that are held for reconnecting clients.
    pub(crate) fn held_bytes(&self) -> usize {
        self.state().held.weight()
    }

    /// Returns the listener that passes events to the clients. Dropping it ends their streams.
    pub(crate) fn listener(&self) -> Listener {
        Listener(self.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn hear(&mut self, events: &[Event], dropped: u64, held: usize) {
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
                client.queue.wake_reader();
            }
            return;
        }
        let all = self.encoder.all(events, self.end);
        for client in &mut self.clients {
            client.hear(events, &all, &mut self.encoder, now);
        }
        self.held.push(start.seq, all, held);
    }
}

impl Client {
    fn lose(&mut self, count: u64, until: Position) {
        self.queue.lose(Lost { count, until });
    }

    /// Queues those of `events` that match the client's lists and its short filter. `all` has all of `events`,
    /// which `encoder` has just encoded.
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
            Ok(()) => self.last_queued = now,
            Err(_) => self.lose(count as u64, all.end),
        }
    }

    /// Handles a batch without an event for this client: queues the position `end` once per [`PASSING`].
    fn pass_by(&mut self, end: Position, now: Instant) {
        if now.duration_since(self.last_queued) >= PASSING && self.queue.is_taking() {
            self.last_queued = now;
            let nothing = Encoded {
                end,
                ..Encoded::default()
            };
            // If there is no room, the next batch in the queue carries the position.
            let _ = self.queue.put(nothing, OVERHEAD);
        } else {
            self.queue.wake_reader();
        }
    }
}

/// The end of a [`Broadcast`] that takes events from the collector.
#[derive(Debug)]
pub(crate) struct Listener(Broadcast);

impl Listen for Listener {
    fn hear(&mut self, events: &[Event], dropped: u64) -> bool {
        self.0.state().hear(events, dropped, self.0.limits.held);
        true
    }

    fn note(&mut self, notices: &[ThrottleNotice]) {
        for client in &mut self.0.state().clients {
            let Some(wanted) = client.wanted.upgrade() else {
                continue;
            };
            let wants = |notice: &&ThrottleNotice| wanted.has_probe(notice.throttled.probe.0);
            client.queue.note(notices.iter().filter(wants));
            client.queue.wake_reader();
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
