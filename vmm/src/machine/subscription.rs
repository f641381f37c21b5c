//! Events from the collector to listeners, each behind a bounded queue of its own.
//!
//! Invariants: a slow listener slows neither the guest nor the others; what it loses is counted and
//! told with the next batch it gets, or as a last batch without events when the machine ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hvprobe_introspect::event::Event;
use hvprobe_introspect::probe::ProbeId;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// A batch of events as a listener gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// In the order of their time.
    pub events: Vec<Event>,
    /// How many were lost, in the machine or before this listener, since the last delivery.
    pub dropped: u64,
}

#[derive(Debug)]
struct Listener {
    filter: Vec<ProbeId>,
    queue: Sender<Delivery>,
    dropped: Arc<AtomicU64>,
}

/// All listeners of one machine.
#[derive(Debug, Default)]
pub(super) struct Hub {
    listeners: Mutex<Option<Vec<Listener>>>,
}

impl Hub {
    pub(super) fn open() -> Self {
        Self {
            listeners: Mutex::new(Some(Vec::new())),
        }
    }

    /// Hands `events` to every listener that wants them.
    pub(super) fn deliver(&self, events: &[Event], dropped: u64) {
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(listeners) = listeners.as_mut() {
            listeners.retain(|listener| listener.deliver(events, dropped));
        }
    }

    /// A new listener for the events of `filter`'s probes, or of all when it is empty. At most
    /// `capacity` batches wait for it.
    pub(super) fn subscribe(&self, filter: Vec<ProbeId>, capacity: usize) -> Subscription {
        let (to, from) = channel(capacity.max(1));
        let dropped = Arc::new(AtomicU64::new(0));
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(listeners) = listeners.as_mut() {
            listeners.push(Listener {
                filter,
                queue: to,
                dropped: Arc::clone(&dropped),
            });
        }
        Subscription {
            queue: from,
            dropped,
        }
    }

    /// The machine has ended: streams end after what is queued.
    pub(super) fn close(&self) {
        *self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Listener {
    /// `false` when nobody listens any more.
    fn deliver(&self, events: &[Event], dropped: u64) -> bool {
        let wanted: Vec<Event> = if self.filter.is_empty() {
            events.to_vec()
        } else {
            let wants = |event: &&Event| self.filter.contains(&event.probe);
            events.iter().filter(wants).copied().collect()
        };
        let dropped = self.dropped.swap(0, Ordering::Relaxed) + dropped;
        if wanted.is_empty() && dropped == 0 {
            return !self.queue.is_closed();
        }
        match self.queue.try_send(Delivery {
            events: wanted,
            dropped,
        }) {
            Ok(()) => true,
            Err(TrySendError::Closed(_)) => false,
            Err(TrySendError::Full(lost)) => {
                let lost = lost.dropped + lost.events.len() as u64;
                self.dropped.fetch_add(lost, Ordering::Relaxed);
                true
            }
        }
    }
}

/// A stream of events of one machine.
#[derive(Debug)]
pub struct Subscription {
    queue: Receiver<Delivery>,
    dropped: Arc<AtomicU64>,
}

impl Subscription {
    /// The next batch; `None` after the last one when the machine has ended.
    pub async fn next(&mut self) -> Option<Delivery> {
        match self.queue.recv().await {
            Some(delivery) => Some(delivery),
            None => self.rest(),
        }
    }

    /// As [`Subscription::next`], blocking the calling thread, which must not be one of an
    /// asynchronous runtime.
    pub fn blocking_next(&mut self) -> Option<Delivery> {
        match self.queue.blocking_recv() {
            Some(delivery) => Some(delivery),
            None => self.rest(),
        }
    }

    fn rest(&mut self) -> Option<Delivery> {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        (dropped > 0).then_some(Delivery {
            events: Vec::new(),
            dropped,
        })
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Regs;

    use hvprobe_introspect::event::{Captured, EventKind};
    use hvprobe_introspect::probe::spec::RegisterSet;

    use super::*;

    fn event(probe: u32) -> Event {
        Event {
            kind: EventKind::Hit,
            shown: RegisterSet::default(),
            captured: Captured::EMPTY,
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

    #[test]
    fn a_slow_listener_learns_how_many_it_lost_and_the_other_loses_none() {
        let hub = Hub::open();
        let mut slow = hub.subscribe(Vec::new(), 1);
        let mut quick = hub.subscribe(Vec::new(), 8);
        for n in 0..3 {
            hub.deliver(&[event(n), event(n)], 0);
        }
        hub.close();
        assert_eq!(
            slow.blocking_next().map(|d| (d.events.len(), d.dropped)),
            Some((2, 0))
        );
        assert_eq!(
            slow.blocking_next().map(|d| (d.events.len(), d.dropped)),
            Some((0, 4))
        );
        assert_eq!(slow.blocking_next(), None);
        for _ in 0..3 {
            assert_eq!(
                quick.blocking_next().map(|d| (d.events.len(), d.dropped)),
                Some((2, 0))
            );
        }
        assert_eq!(quick.blocking_next(), None);
    }

    #[test]
    fn a_filter_lets_only_its_probes_through() {
        let hub = Hub::open();
        let mut filtered = hub.subscribe(vec![ProbeId(2)], 8);
        hub.deliver(&[event(1), event(2), event(3)], 0);
        hub.deliver(&[event(1)], 0);
        hub.close();
        assert_eq!(
            filtered.blocking_next(),
            Some(Delivery {
                events: vec![event(2)],
                dropped: 0
            })
        );
        assert_eq!(filtered.blocking_next(), None);
    }
}
