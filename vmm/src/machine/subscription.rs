//! Events from the collector to listeners, each behind a bounded queue of its own.
//!
//! Invariants: a slow listener slows neither the guest nor the others; what it loses is counted and
//! told with the next batch it gets, or as a last batch without events when the machine ends; no
//! notice of throttled hits is lost, those that have to wait are added up for each probe.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hvprobe_introspect::event::Event;
use hvprobe_introspect::probe::ProbeId;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::throttle::ThrottleNotice;

/// A batch of events as a listener gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// In the order of their time.
    pub events: Vec<Event>,
    /// How many were lost, in the machine or before this listener, since the last delivery.
    pub dropped: u64,
    /// Hits that were throttled.
    pub throttled: Vec<ThrottleNotice>,
}

#[derive(Debug)]
struct Listener {
    filter: Vec<ProbeId>,
    queue: Sender<Delivery>,
    dropped: Arc<AtomicU64>,
    /// Notices that did not fit into the queue: as many as there are probes.
    untold: Untold,
}

/// Notices for a listener, one for each probe.
type Untold = Arc<Mutex<BTreeMap<ProbeId, ThrottleNotice>>>;

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

    /// Tells `notices` to every listener that wants to hear of these probes.
    pub(super) fn tell(&self, notices: &[ThrottleNotice]) {
        if notices.is_empty() {
            return;
        }
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(listeners) = listeners.as_mut() {
            for listener in listeners.iter() {
                listener.note(notices);
            }
            listeners.retain(|listener| listener.deliver(&[], 0));
        }
    }

    /// A new listener for the events of `filter`'s probes, or of all when it is empty. At most
    /// `capacity` batches wait for it.
    pub(super) fn subscribe(&self, filter: Vec<ProbeId>, capacity: usize) -> Subscription {
        let (to, from) = channel(capacity.max(1));
        let dropped = Arc::new(AtomicU64::new(0));
        let untold = Untold::default();
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(listeners) = listeners.as_mut() {
            listeners.push(Listener {
                filter,
                queue: to,
                dropped: Arc::clone(&dropped),
                untold: Arc::clone(&untold),
            });
        }
        Subscription {
            queue: from,
            dropped,
            untold,
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

/// What is to be told, which is nothing from then on.
fn take(untold: &Untold) -> Vec<ThrottleNotice> {
    let mut untold = untold.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut *untold).into_values().collect()
}

impl Listener {
    /// Keeps those of `notices` that it wants to hear for the next delivery.
    fn note(&self, notices: &[ThrottleNotice]) {
        let mut untold = self.untold.lock().unwrap_or_else(PoisonError::into_inner);
        for notice in notices {
            let probe = notice.throttled.probe;
            if !self.filter.is_empty() && !self.filter.contains(&probe) {
                continue;
            }
            untold
                .entry(probe)
                .and_modify(|earlier| {
                    earlier.throttled.count += notice.throttled.count;
                    earlier.throttled.disabled = notice.throttled.disabled;
                    earlier.window += notice.window;
                })
                .or_insert_with(|| notice.clone());
        }
    }

    /// `false` when nobody listens any more.
    fn deliver(&self, events: &[Event], dropped: u64) -> bool {
        let wanted: Vec<Event> = if self.filter.is_empty() {
            events.to_vec()
        } else {
            let wants = |event: &&Event| self.filter.contains(&event.probe);
            events.iter().filter(wants).copied().collect()
        };
        let dropped = self.dropped.swap(0, Ordering::Relaxed) + dropped;
        let throttled = take(&self.untold);
        if wanted.is_empty() && dropped == 0 && throttled.is_empty() {
            return !self.queue.is_closed();
        }
        match self.queue.try_send(Delivery {
            events: wanted,
            dropped,
            throttled,
        }) {
            Ok(()) => true,
            Err(TrySendError::Closed(_)) => false,
            Err(TrySendError::Full(lost)) => {
                self.note(&lost.throttled);
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
    untold: Untold,
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
        let throttled = take(&self.untold);
        (dropped > 0 || !throttled.is_empty()).then_some(Delivery {
            events: Vec::new(),
            dropped,
            throttled,
        })
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Regs;

    use hvprobe_introspect::event::{Captured, EventKind};
    use std::time::Duration;

    use hvprobe_introspect::probe::Throttled;
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
    fn notices_wait_for_a_slow_listener_and_are_added_up() {
        let notice = |probe, count| ThrottleNotice {
            throttled: Throttled {
                probe: ProbeId(probe),
                name: format!("p{probe}"),
                count,
                disabled: false,
            },
            window: Duration::from_secs(1),
        };
        let hub = Hub::open();
        let mut slow = hub.subscribe(Vec::new(), 1);
        let mut other = hub.subscribe(vec![ProbeId(2)], 8);
        hub.deliver(&[event(1)], 0);
        hub.tell(&[notice(1, 5), notice(2, 7)]);
        hub.tell(&[notice(1, 6)]);
        hub.close();
        assert_eq!(slow.blocking_next().map(|d| d.events.len()), Some(1));
        let told = slow.blocking_next().map(|d| d.throttled);
        let twice = ThrottleNotice {
            window: Duration::from_secs(2),
            ..notice(1, 11)
        };
        assert_eq!(told, Some(vec![twice, notice(2, 7)]));
        assert_eq!(slow.blocking_next(), None);
        let told = other.blocking_next().map(|d| d.throttled);
        assert_eq!(told, Some(vec![notice(2, 7)]));
        assert_eq!(other.blocking_next(), None);
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
                dropped: 0,
                throttled: Vec::new(),
            })
        );
        assert_eq!(filtered.blocking_next(), None);
    }
}
