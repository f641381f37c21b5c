use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use hvprobe_arch::Regs;
use hvprobe_spec::{ProbeId, RegisterSet};

use super::*;
use crate::event::{Captured, Drained, EventKind};

/// How long a test waits for the collector.
const LIMIT: Duration = Duration::from_secs(30);

pub(in crate::event) fn event(vcpu: u32, host_ns: u64) -> Event {
    Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: ProbeId(1),
        vcpu,
        host_ns,
        guest_tsc: 0,
        regs: Regs::default(),
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: None,
        cost_ns: 0,
    }
}

type Seen = Arc<Mutex<(Vec<Event>, u64)>>;

fn collector(
    sources: Vec<Box<dyn Source>>,
    vcpus: usize,
    capacity: usize,
) -> (Collector, Vec<EventProducer>, Seen) {
    let seen = Seen::default();
    let into = Arc::clone(&seen);
    let (collector, producers) = Collector::start_with(
        sources,
        vcpus,
        capacity,
        Box::new(move |events, dropped| {
            assert!(events.len() <= crate::event::order::BATCH);
            assert!(events.is_sorted_by_key(|event| event.host_ns));
            let mut seen = into.lock().expect("the sink does not panic");
            seen.0.extend_from_slice(events);
            seen.1 += dropped;
        }),
    )
    .expect("a thread can be started");
    (collector, producers, seen)
}

/// A source with `left` events of vCPU `vcpu`. Loses one event at every call that returns events.
struct Synthetic {
    vcpu: u32,
    left: u64,
    calls: Arc<AtomicU64>,
}

impl Source for Synthetic {
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained {
        let most = self.left.min(most as u64);
        for _ in 0..most {
            // Each is later than the one before.
            batch.push(event(self.vcpu, u64::MAX - self.left));
            self.left -= 1;
        }
        let lost = u64::from(most > 0);
        self.calls.fetch_add(lost, Ordering::Relaxed);
        Drained {
            lost,
            more: self.left > 0,
            ..Drained::default()
        }
    }

    fn patience(&self) -> Option<Duration> {
        None
    }
}

fn times(seen: &[Event], vcpu: u32) -> Vec<u64> {
    let of_vcpu = seen.iter().filter(|e| e.vcpu == vcpu);
    of_vcpu.map(|e| e.host_ns).collect()
}

#[test]
fn every_event_of_parallel_producers_is_delivered_or_counted() {
    let (collector, producers, seen) = collector(Vec::new(), 4, 64);
    thread::scope(|scope| {
        for (vcpu, mut producer) in producers.into_iter().enumerate() {
            scope.spawn(move || {
                for n in 0..10_000 {
                    producer.push(|| event(u32::try_from(vcpu).expect("small"), n + 1), |_| {});
                }
            });
        }
    });
    collector.finish();
    let seen = seen.lock().expect("no panic");
    assert_eq!(seen.0.len() as u64 + seen.1, 40_000);
    for vcpu in 0..4 {
        assert!(
            times(&seen.0, vcpu).is_sorted(),
            "events of vCPU {vcpu} changed their order"
        );
    }
    assert!(seen.0.iter().map(|e| e.seq).eq(0..seen.0.len() as u64));
}

#[test]
fn sources_and_rings_share_batches_and_nothing_is_left_in_either() {
    let calls = Arc::new(AtomicU64::new(0));
    let source = |vcpu| -> Box<dyn Source> {
        Box::new(Synthetic {
            vcpu,
            left: 5000,
            calls: Arc::clone(&calls),
        })
    };
    let (collector, mut producers, seen) = collector(vec![source(1), source(2)], 1, 4096);
    for n in 1..=3000 {
        producers[0].push(|| event(0, n), |_| {});
    }
    collector.finish();
    let seen = seen.lock().expect("no panic");
    assert_eq!(seen.0.len(), 13_000);
    assert_eq!(seen.1, calls.load(Ordering::Relaxed));
    for (vcpu, number) in [(0, 3000), (1, 5000), (2, 5000)] {
        let times = times(&seen.0, vcpu);
        assert_eq!(times.len(), number);
        assert!(times.is_sorted(), "events of {vcpu} changed their order");
    }
    assert!(seen.0.iter().map(|e| e.seq).eq(0..13_000));
}

/// Returns a collector that makes a pass only when it is called, and the producing end of its only ring.
fn by_hand(sources: Vec<Box<dyn Source>>, capacity: usize) -> (Drain, EventProducer) {
    let (producer, consumer) = RingBuffer::new(capacity);
    let counts = Arc::<VcpuCounts>::default();
    let drain = Drain {
        order: Order::new(vec![consumer]),
        counts: vec![Arc::clone(&counts)],
        sources,
        owed: Owed::new(Arc::default()),
    };
    let producer = EventProducer {
        ring: producer,
        counts,
        waker: Arc::new(Waker {
            asleep: AtomicBool::new(false),
            collector: thread::current(),
        }),
    };
    (drain, producer)
}

#[test]
fn events_of_one_ring_are_put_in_order_where_they_are_and_however_they_lie_there() {
    let (mut drain, mut producer) = by_hand(Vec::new(), 5);
    let (mut seqs, mut wrapped) = (0.., 0);
    for round in 0..200 {
        // Events out of order, which lie across the end of the ring in some rounds.
        for n in [3, 1, 2] {
            producer.push(|| event(0, n), |event| event.guest_tsc = event.host_ns + 10);
        }
        let (to, from) = channel();
        let mut sink: Sink = Box::new(move |events, dropped| {
            assert_eq!(dropped, 0);
            let _ = to.send(events.to_vec());
        });
        assert_eq!(
            drain.once(false, false, &mut sink),
            PassResult::All { of_rings: true }
        );
        drop(sink);
        // They come in two parts if they lay across the end of the ring. Each part is in order.
        let parts: Vec<Vec<Event>> = from.iter().collect();
        wrapped += usize::from(parts.len() == 2);
        assert!(
            (1..=2).contains(&parts.len())
                && parts.iter().all(|it| it.is_sorted_by_key(|e| e.host_ns)),
            "round {round}: {parts:?}"
        );
        let mut events = parts.concat();
        assert!(events.iter().map(|e| e.seq).eq(seqs.by_ref().take(3)));
        assert!(events.iter().all(|e| e.guest_tsc == e.host_ns + 10));
        events.sort_by_key(|e| e.host_ns);
        assert!(events.iter().map(|e| e.host_ns).eq(1..=3), "round {round}");
        assert_eq!(producer.ring.slots(), 5, "the places are released");
    }
    // Three events lie across the end of the ring's five places if they begin at the last place or at the one
    // before it.
    assert_eq!(wrapped, 80);
}

#[test]
fn events_keep_their_places_until_they_are_handed_on_and_others_are_counted_meanwhile() {
    let (mut drain, producer) = by_hand(Vec::new(), 5);
    let producer = Arc::new(Mutex::new(producer));
    let push = |number| {
        for n in 0..number {
            let mut producer = producer.lock().expect("no panic");
            producer.push(|| event(0, n), |_| {});
        }
    };
    push(3);
    let mut sink: Sink = Box::new({
        let producer = Arc::clone(&producer);
        move |events, dropped| {
            assert_eq!((events.len(), dropped), (3, 0));
            for n in 0..3 {
                let mut producer = producer.lock().expect("no panic");
                producer.push(|| event(0, n), |_| {});
            }
        }
    });
    assert_eq!(
        drain.once(false, false, &mut sink),
        PassResult::All { of_rings: true }
    );
    let (to, from) = channel();
    let mut sink: Sink = Box::new(move |events, dropped| {
        let _ = to.send((events.len(), dropped));
    });
    drain.once(false, false, &mut sink);
    assert_eq!(from.try_recv(), Ok((2, 1)));
}

/// A source that reports more events at one call after another, and returns its only event at the last of these
/// calls.
struct Reluctant {
    calls: u64,
}

impl Source for Reluctant {
    fn drain(&mut self, batch: &mut Vec<Event>, _most: usize) -> Drained {
        self.calls = self.calls.saturating_sub(1);
        if self.calls == 1 {
            batch.push(event(0, 1));
        }
        Drained {
            more: self.calls > 1,
            ..Drained::default()
        }
    }

    fn patience(&self) -> Option<Duration> {
        None
    }
}

#[test]
fn a_source_that_gave_nothing_but_has_more_is_called_again_and_not_left_behind_at_the_end() {
    let (collector, _producers, seen) = collector(vec![Box::new(Reluctant { calls: 100 })], 1, 2);
    collector.finish();
    assert_eq!(seen.lock().expect("no panic").0.len(), 1);
}

/// A source that returns one event per call, and has to be called once more after the last event.
struct Confirmed {
    left: u64,
    confirm: Option<Sender<()>>,
}

impl Source for Confirmed {
    fn drain(&mut self, batch: &mut Vec<Event>, _most: usize) -> Drained {
        match self.left {
            0 => {
                if let Some(confirm) = self.confirm.take() {
                    let _ = confirm.send(());
                }
            }
            _ => {
                batch.push(event(0, self.left));
                self.left -= 1;
            }
        }
        Drained::default()
    }

    fn patience(&self) -> Option<Duration> {
        self.confirm.as_ref().map(|_| Duration::from_micros(100))
    }
}

#[test]
fn a_source_that_gave_its_last_event_is_called_again_when_it_asks_for_that() {
    let (to, from) = channel();
    let source = Confirmed {
        left: 3,
        confirm: Some(to),
    };
    let (collector, _producers, seen) = collector(vec![Box::new(source)], 1, 2);
    assert_eq!(from.recv_timeout(LIMIT), Ok(()));
    assert_eq!(seen.lock().expect("no panic").0.len(), 3);
    collector.finish();
}

#[test]
fn a_sleeping_collector_is_woken_by_a_single_event() {
    let (to, from) = channel();
    let (collector, mut producers) = Collector::start(
        1,
        8,
        Box::new(move |events, _| {
            let _ = to.send(events.len());
        }),
    )
    .expect("a thread can be started");
    for n in 0..100 {
        producers[0].push(|| event(0, 1), |_| {});
        assert_eq!(from.recv_timeout(LIMIT), Ok(1), "round {n}");
    }
    collector.finish();
}

/// A source of the events that come through a channel.
struct Relay {
    from: Receiver<Event>,
    patience: Option<Duration>,
}

impl Source for Relay {
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained {
        let before = batch.len();
        batch.extend(self.from.try_iter().take(most));
        Drained {
            // There may be more.
            more: batch.len() - before == most,
            ..Drained::default()
        }
    }

    fn patience(&self) -> Option<Duration> {
        self.patience
    }
}

/// Sends an event into a source a hundred times and waits each time until it arrives.
fn relay(patience: Option<Duration>, wake: bool) {
    let (into, source) = channel();
    let (to, from) = channel();
    let source = Relay {
        from: source,
        patience,
    };
    let (collector, producers) = Collector::start_with(
        vec![Box::new(source)],
        1,
        8,
        Box::new(move |events, _| {
            let _ = to.send(events.len());
        }),
    )
    .expect("a thread can be started");
    for n in 0..100 {
        into.send(event(0, n)).expect("the source is there");
        if wake {
            producers[0].wake();
        }
        assert_eq!(from.recv_timeout(LIMIT), Ok(1), "round {n}");
    }
    collector.finish();
}

#[test]
fn a_source_is_emptied_when_its_patience_ends() {
    relay(Some(Duration::from_micros(100)), false);
}

/// Reports more losses than there can be.
struct Liar(bool);

impl Source for Liar {
    fn drain(&mut self, _: &mut Vec<Event>, _: usize) -> Drained {
        Drained {
            lost: if std::mem::take(&mut self.0) {
                u64::MAX
            } else {
                0
            },
            ..Drained::default()
        }
    }

    fn patience(&self) -> Option<Duration> {
        None
    }
}

#[test]
fn losses_that_cannot_be_added_up_are_as_many_as_can_be() {
    let (collector, mut producers, seen) =
        collector(vec![Box::new(Liar(true)), Box::new(Liar(true))], 1, 4);
    producers[0].push(|| event(0, 1), |_| {});
    collector.finish();
    let seen = seen.lock().expect("no panic");
    assert_eq!((seen.0.len(), seen.1), (1, u64::MAX));
}

#[test]
fn a_source_is_emptied_when_somebody_wakes_the_collector() {
    relay(None, true);
}

#[test]
fn a_collector_whose_sink_panics_is_known_to_have_ended() {
    let sink: Sink = Box::new(|_, _| panic!("on purpose"));
    let (collector, mut producers) = Collector::start(1, 4, sink).unwrap();
    assert!(!collector.has_ended());
    producers[0].push(|| event(0, 1), |_| ());
    let begun = Instant::now();
    while !collector.has_ended() {
        assert!(begun.elapsed() < LIMIT, "it goes on");
        thread::yield_now();
    }
    collector.finish();
}

#[test]
fn who_waits_goes_on_when_all_that_there_was_is_handed_on() {
    let (collector, mut producers, seen) = collector(Vec::new(), 2, 64);
    let flush = collector.flush();
    let mut made = 0;
    for round in 0..200 {
        for producer in &mut producers {
            for _ in 0..round % 7 {
                made += 1;
                producer.push(|| event(0, made), |_| {});
            }
        }
        assert!(flush.wait(LIMIT), "not handed on");
        let seen = seen.lock().expect("no panic");
        assert_eq!(seen.0.len() as u64 + seen.1, made);
    }
    collector.finish();
    // After its end there is nothing to wait for.
    assert!(flush.wait(LIMIT), "not told of the end");
}

#[test]
fn who_waits_is_not_notified_while_a_hit_that_lasts_holds_what_there_was() {
    const LASTS: Duration = Duration::from_millis(300);
    let (collector, mut producers, seen) = collector(Vec::new(), 2, 64);
    let flush = collector.flush();
    let [lasting, other] = &mut producers[..] else {
        panic!("two virtual CPUs")
    };
    lasting.turn();
    other.push(|| event(1, 20), |_| {});
    assert!(!flush.wait(LASTS), "told of what is held");
    lasting.push(|| event(0, 10), |_| {});
    lasting.turn();
    assert!(flush.wait(LIMIT), "not handed on");
    let times: Vec<_> = seen.lock().expect("no panic").0.clone();
    assert_eq!(times.len(), 2, "{times:?}");
    collector.finish();
}

#[test]
fn who_waits_beside_others_goes_on_while_events_come() {
    let (collector, producers, seen) = collector(Vec::new(), 2, 64);
    let finish = AtomicBool::new(false);
    thread::scope(|scope| {
        for mut producer in producers {
            let finish = &finish;
            scope.spawn(move || {
                for n in 1.. {
                    producer.push(|| event(0, n), |_| {});
                    if finish.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let flush = collector.flush();
                scope.spawn(move || (0..20).all(|_| flush.wait(LIMIT)))
            })
            .collect();
        let in_time = waiting
            .into_iter()
            .all(|waiting| waiting.join().unwrap_or(false));
        finish.store(true, Ordering::Relaxed);
        assert!(in_time, "not handed on");
    });
    collector.finish();
    assert!(seen.lock().expect("no panic").1 < u64::MAX);
}

#[test]
fn room_is_what_a_virtual_cpu_has_left_of_its_ring() {
    const CAPACITY: u64 = 256;
    let (mut drain, mut producer) = by_hand(Vec::new(), 256);
    let mut rooms = Vec::new();
    for n in 0..=CAPACITY {
        rooms.push(producer.room());
        producer.push(|| event(0, n), |_| ());
    }
    let (half, most) = (128, 256 - 64);
    assert!(rooms[..=half].iter().all(|room| *room == Headroom::Plenty));
    assert!(
        rooms[half + 1..=most]
            .iter()
            .all(|room| *room == Headroom::Scant)
    );
    assert!(rooms[most + 1..].iter().all(|room| *room == Headroom::None));
    let mut sink: Sink = Box::new(|_, _| ());
    drain.once(false, true, &mut sink);
    assert_eq!(producer.room(), Headroom::Plenty);
}
