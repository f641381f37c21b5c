//! One machine's events on their way to its clients.
//!
//! Invariants: the collector waits for no client; a batch is encoded once for all clients that want
//! all of it, and not at all if no client takes it; what waits for one client never takes more than
//! [`WAITING`] bytes, what waits for all clients of a server no more than their pool has, and what a client
//! loses is counted for it alone.

use std::collections::HashSet;
use std::mem::size_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_hit::event::Event;
use hvprobe_machine::queue::{Entrance, Exit, Pool, queue_in};
use hvprobe_machine::{Listen, ThrottleNotice};
use prost::bytes::Bytes;

use crate::wire::event::{self, EVENT_MAX};

/// Bytes that wait for one client before it begins to lose events: some 30,000 hits with all their
/// registers.
const WAITING: usize = 8 << 20;
/// What an encoded batch takes besides its bytes: itself, its places in queues, and the counts that
/// it is shared with.
const OVERHEAD: usize = 256;

/// A batch of events, encoded. Copies share it.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    /// Ready to be part of a `SubscribeResponse`.
    pub(crate) events: Bytes,
    /// The probes they are of, each once.
    pub(crate) probes: Arc<[u32]>,
}

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
    /// Where batches are encoded.
    scratch: Vec<u8>,
}

#[derive(Debug)]
struct Client {
    /// Empty for all probes.
    filter: HashSet<u32>,
    queue: Entrance<Encoded>,
}

impl Broadcast {
    /// For clients that have no more waiting for them, together with others of `pool`, than that has.
    pub(crate) fn within(pool: Pool) -> Self {
        Self {
            state: Arc::default(),
            pool,
        }
    }

    /// The events of `filter`'s probes, or of all when it is empty, from now on.
    pub(crate) fn subscribe(&self, filter: &[u32]) -> Exit<Encoded> {
        let (into, from) = queue_in(&self.pool, WAITING);
        let mut state = self.state();
        // Without its other end a queue ends.
        if !state.closed {
            state.clients.push(Client {
                filter: filter.iter().copied().collect(),
                queue: into,
            });
        }
        from
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
        let mut whole = None;
        let scratch = &mut self.scratch;
        self.clients.retain_mut(|client| {
            if client.queue.is_abandoned() {
                return false;
            }
            client.queue.lose(dropped);
            let count = client.count(events);
            if count == 0 {
                client.queue.tell();
                return true;
            }
            if !client.queue.is_taking() {
                client.queue.lose(count);
                return true;
            }
            let encoded = if client.filter.is_empty() {
                let whole = whole.get_or_insert_with(|| encode(events.iter(), scratch));
                whole.clone()
            } else {
                encode(events.iter().filter(|event| client.wants(event)), scratch)
            };
            let weight = encoded.weight();
            if client.queue.put(encoded, weight).is_err() {
                client.queue.lose(count);
            }
            true
        });
    }
}

impl Client {
    fn wants(&self, event: &Event) -> bool {
        self.filter.is_empty() || self.filter.contains(&event.probe.0)
    }

    /// How many of `events` it wants.
    fn count(&self, events: &[Event]) -> u64 {
        if self.filter.is_empty() {
            return events.len() as u64;
        }
        events.iter().filter(|event| self.wants(event)).count() as u64
    }
}

impl Encoded {
    /// The memory it takes where nobody shares it.
    fn weight(&self) -> usize {
        self.events.len() + self.probes.len() * size_of::<u32>() + OVERHEAD
    }
}

fn encode<'a>(events: impl Iterator<Item = &'a Event>, scratch: &mut Vec<u8>) -> Encoded {
    scratch.clear();
    let mut probes = Vec::new();
    for event in events {
        scratch.reserve(EVENT_MAX);
        event::event(event, scratch);
        // Those of one probe often follow each other.
        if probes.last() != Some(&event.probe.0) {
            probes.push(event.probe.0);
        }
    }
    probes.sort_unstable();
    probes.dedup();
    Encoded {
        events: Bytes::copy_from_slice(scratch),
        probes: probes.into(),
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
            let wants = |notice: &&ThrottleNotice| {
                client.filter.is_empty() || client.filter.contains(&notice.throttled.probe.0)
            };
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
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Regs;
    use hvprobe_hit::event::{Captured, EventKind};
    use hvprobe_proto::v1::SubscribeResponse;
    use hvprobe_spec::{ProbeId, RegisterSet};
    use prost::Message as _;

    use super::*;

    fn event(probe: u32) -> Event {
        Event {
            kind: EventKind::Hit,
            shown: RegisterSet::default(),
            captured: Captured::nothing(),
            seq: 0,
            probe: ProbeId(probe),
            vcpu: 0,
            host_ns: 0,
            guest_tsc: 0,
            regs: Regs::default(),
            task: None,
            cost_ns: 0,
        }
    }

    /// The probes whose events come next, and what was lost before them.
    fn next(from: &mut Exit<Encoded>) -> Option<(Vec<u32>, u64)> {
        let taken = from.blocking_next()?;
        let events = taken.item.map(|encoded| encoded.events).unwrap_or_default();
        let message = SubscribeResponse::decode(events).expect("a message");
        let probes = message.events.iter().map(|event| event.probe).collect();
        Some((probes, taken.lost))
    }

    #[test]
    fn batch_is_shared_by_all_who_want_all_of_it() {
        let broadcast = Broadcast::default();
        let mut listener = broadcast.listener();
        let mut clients = [broadcast.subscribe(&[]), broadcast.subscribe(&[])];
        listener.hear(&[event(3), event(1), event(3)], 0);
        let taken = clients.each_mut().map(|from| from.try_next());
        let [one, other] = taken.map(|taken| taken.and_then(|taken| taken.item).expect("a batch"));
        assert_eq!(one.events.as_ptr(), other.events.as_ptr());
        assert_eq!(*one.probes, [1, 3]);
    }

    #[test]
    fn filter_lets_only_its_probes_through_and_losses_of_the_machine_reach_all() {
        let broadcast = Broadcast::default();
        let mut listener = broadcast.listener();
        let mut filtered = broadcast.subscribe(&[2]);
        let mut all = broadcast.subscribe(&[]);
        listener.hear(&[event(1), event(2), event(3)], 0);
        listener.hear(&[event(1)], 7);
        drop(listener);
        assert_eq!(next(&mut filtered), Some((vec![2], 0)));
        assert_eq!(next(&mut filtered), Some((vec![], 7)));
        assert_eq!(next(&mut filtered), None);
        assert_eq!(next(&mut all), Some((vec![1, 2, 3], 0)));
        assert_eq!(next(&mut all), Some((vec![1], 7)));
        assert_eq!(next(&mut all), None);
        // Who comes too late finds the end.
        assert_eq!(next(&mut broadcast.subscribe(&[])), None);
    }

    #[test]
    fn client_that_never_reads_costs_a_bounded_number_of_bytes_and_knows_what_it_lost() {
        const BATCHES: u64 = 10_000;
        let broadcast = Broadcast::default();
        let mut listener = broadcast.listener();
        let mut stuck = broadcast.subscribe(&[]);
        let batch: Vec<_> = (0..1000).map(event).collect();
        for _ in 0..BATCHES {
            listener.hear(&batch, 0);
            assert!(broadcast.state().clients[0].queue.waiting() <= WAITING);
        }
        drop(listener);
        let (mut bytes, mut events, mut lost) = (0, 0, 0);
        while let Some(taken) = stuck.try_next() {
            lost += taken.lost;
            if let Some(encoded) = taken.item {
                bytes += encoded.weight();
                events += batch.len() as u64;
            }
        }
        assert!(bytes > WAITING / 2 && bytes <= WAITING, "{bytes}");
        assert_eq!(events + lost, BATCHES * batch.len() as u64);
    }

    #[test]
    fn client_that_left_is_forgotten() {
        let broadcast = Broadcast::default();
        let mut listener = broadcast.listener();
        drop(broadcast.subscribe(&[]));
        listener.hear(&[event(1)], 0);
        assert!(broadcast.state().clients.is_empty());
    }
}
