//! Distribution of events from the collector to listeners.
//!
//! Invariants: the collector waits for no listener, so a slow one slows down neither the guest nor the other
//! listeners. Events that a [`Subscription`] loses are counted. The count comes with the subscription's next batch,
//! or as a last batch without events when the machine ends. The events that wait for a subscription are bounded.

use std::collections::HashSet;
use std::fmt::Debug;
use std::mem::size_of;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hvprobe_hit::event::Event;
use hvprobe_spec::ProbeId;

use super::notice::ThrottleNotice;
use super::queue::{Entrance, Exit, Taken, queue};

/// A batch of events for one listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Events in the order of time.
    pub events: Vec<Event>,
    /// Number of events lost since the last delivery, in the machine or because this listener was too slow.
    pub dropped: u64,
    /// Notices of throttled hits.
    pub throttled: Vec<ThrottleNotice>,
}

/// Listener to the collector's events. It is dropped when the machine has ended.
pub trait Listen: Debug + Send {
    /// Handles a batch. `dropped` events were lost before it. Returns whether the listener wants more. Must not
    /// block: it runs on the collector's thread, which empties no ring meanwhile.
    fn hear(&mut self, events: &[Event], dropped: u64) -> bool;

    /// Handles notices of throttled hits. Must not block either.
    fn note(&mut self, notices: &[ThrottleNotice]);
}

/// All listeners of one machine.
#[derive(Debug)]
pub(crate) struct Hub {
    /// `None` once the machine has ended.
    listeners: Mutex<Option<Vec<Box<dyn Listen>>>>,
}

impl Hub {
    pub(crate) fn open() -> Self {
        Self {
            listeners: Mutex::new(Some(Vec::new())),
        }
    }

    /// Passes `events` to every listener, and removes those that want no more.
    pub(crate) fn deliver(&self, events: &[Event], dropped: u64) {
        if let Some(listeners) = self.listeners().as_mut() {
            listeners.retain_mut(|listener| listener.hear(events, dropped));
        }
    }

    /// Adds `listener`, unless the machine has ended. Also removes listeners that want no more, because without
    /// events nothing else removes them.
    pub(crate) fn listen(&self, listener: Box<dyn Listen>) {
        if let Some(listeners) = self.listeners().as_mut() {
            listeners.retain_mut(|listener| listener.hear(&[], 0));
            listeners.push(listener);
        }
    }

    /// Passes `notices` to every listener.
    pub(crate) fn notify(&self, notices: &[ThrottleNotice]) {
        if notices.is_empty() {
            return;
        }
        if let Some(listeners) = self.listeners().as_mut() {
            for listener in listeners {
                listener.note(notices);
            }
        }
    }

    /// Adds a listener to the events of the probes in `filter`, or of all probes if `filter` is empty. At most
    /// `capacity` events wait for the listener.
    pub(crate) fn subscribe(&self, filter: Vec<ProbeId>, capacity: usize) -> Subscription {
        let (into, from) = queue(capacity.saturating_mul(size_of::<Event>()));
        self.listen(Box::new(Subscriber {
            filter: filter.into_iter().collect(),
            queue: into,
        }));
        Subscription { queue: from }
    }

    /// Ends the streams, because the machine has ended. Events that are queued still arrive.
    pub(crate) fn close(&self) {
        *self.listeners() = None;
    }

    fn listeners(&self) -> MutexGuard<'_, Option<Vec<Box<dyn Listen>>>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writing end of a subscription.
#[derive(Debug)]
struct Subscriber {
    /// Probes whose events the subscription gets. If empty, it gets those of all probes.
    filter: HashSet<ProbeId>,
    queue: Entrance<Vec<Event>>,
}

impl Listen for Subscriber {
    fn hear(&mut self, events: &[Event], dropped: u64) -> bool {
        if self.queue.is_abandoned() {
            return false;
        }
        self.queue.lose(dropped);
        let wanted: Vec<Event> = if self.filter.is_empty() {
            events.to_vec()
        } else {
            let wanted = events
                .iter()
                .filter(|event| self.filter.contains(&event.probe));
            wanted.copied().collect()
        };
        if wanted.is_empty() {
            self.queue.wake_reader();
        } else {
            let weight = wanted.len() * size_of::<Event>();
            if let Err(lost) = self.queue.put(wanted, weight) {
                self.queue.lose(lost.len() as u64);
            }
        }
        true
    }

    fn note(&mut self, notices: &[ThrottleNotice]) {
        let wants = |notice: &&ThrottleNotice| {
            self.filter.is_empty() || self.filter.contains(&notice.throttled.probe)
        };
        self.queue.note(notices.iter().filter(wants));
        self.queue.wake_reader();
    }
}

/// A stream of events of one machine.
#[derive(Debug)]
pub struct Subscription {
    queue: Exit<Vec<Event>>,
}

impl Subscription {
    /// Waits for the next batch, and returns it; `None` after the last one, when the machine has ended.
    pub async fn next(&mut self) -> Option<Delivery> {
        self.queue.next().await.map(Delivery::from)
    }

    /// Like [`Subscription::next`], but blocks the calling thread, which must not belong to an
    /// asynchronous runtime.
    pub fn blocking_next(&mut self) -> Option<Delivery> {
        self.queue.blocking_next().map(Delivery::from)
    }

    /// Returns the next batch if there is one now.
    pub fn try_next(&mut self) -> Option<Delivery> {
        self.queue.try_next().map(Delivery::from)
    }
}

impl From<Taken<Vec<Event>>> for Delivery {
    fn from(taken: Taken<Vec<Event>>) -> Self {
        Self {
            events: taken.item.unwrap_or_default(),
            dropped: taken.lost,
            throttled: taken.notices,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hvprobe_arch::Regs;
    use hvprobe_engine::Throttled;
    use hvprobe_hit::event::{Captured, EventKind};
    use hvprobe_spec::RegisterSet;

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

    #[test]
    fn a_slow_listener_learns_how_many_it_lost_and_the_other_loses_none() {
        let hub = Hub::open();
        let mut slow = hub.subscribe(Vec::new(), 2);
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
    fn listeners_that_come_and_go_without_an_event_leave_nothing() {
        let hub = Hub::open();
        for _ in 0..100 {
            drop(hub.subscribe(Vec::new(), 8));
        }
        let _last = hub.subscribe(Vec::new(), 8);
        assert_eq!(hub.listeners().as_ref().map(Vec::len), Some(1));
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
        hub.notify(&[notice(1, 5), notice(2, 7)]);
        hub.notify(&[notice(1, 6)]);
        hub.close();
        let first = slow.blocking_next().expect("an event");
        assert_eq!(first.events.len(), 1);
        let throttled = Some(first.throttled);
        let twice = ThrottleNotice {
            window: Duration::from_secs(2),
            ..notice(1, 11)
        };
        assert_eq!(throttled, Some(vec![twice, notice(2, 7)]));
        assert_eq!(slow.blocking_next(), None);
        let throttled = other.blocking_next().map(|d| d.throttled);
        assert_eq!(throttled, Some(vec![notice(2, 7)]));
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
