//! Events from all sources are delivered in order of time, even if some become visible late.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rtrb::{Producer, RingBuffer};

use super::*;
use crate::event::collector::tests::event;

/// Rings and sources as a collector sees them.
struct Rig {
    order: Order,
    rings: Vec<Producer<Event>>,
    /// The events that each source returns at its next call.
    sources: Vec<Vec<Event>>,
    keeps_back: bool,
    /// Number of beginnings and ends of hits, for each vCPU.
    turns: Vec<u64>,
    seen: Arc<Mutex<Vec<Event>>>,
    sink: Sink,
}

impl Rig {
    fn new(rings: usize, sources: usize, capacity: usize) -> Self {
        let (producers, consumers) = (0..rings).map(|_| RingBuffer::new(capacity)).unzip();
        let seen = Arc::<Mutex<Vec<Event>>>::default();
        let into = Arc::clone(&seen);
        Self {
            order: Order::new(consumers),
            turns: vec![0; rings],
            rings: producers,
            sources: vec![Vec::new(); sources],
            keeps_back: false,
            seen,
            sink: Box::new(move |events, _| into.lock().expect("no panic").extend(events)),
        }
    }

    fn pass(&mut self, is_last: bool) -> PassResult {
        let mut pass = self.order.pass(self.sources.len(), true, is_last);
        for (vcpu, turns) in self.turns.iter().enumerate() {
            pass.look_at(vcpu, *turns);
        }
        for source in &mut self.sources {
            pass.take(|batch, most| {
                let some = source.len().min(most);
                batch.extend(source.drain(..some));
                Drained {
                    more: !source.is_empty(),
                    keeps_back: self.keeps_back,
                    ..Drained::default()
                }
            });
        }
        pass.hand_on(0, &mut self.sink)
    }

    fn push(&mut self, ring: usize, time: u64) {
        let vcpu = u32::try_from(ring).expect("small");
        self.rings[ring].push(event(vcpu, time)).expect("room");
    }

    fn times(&self) -> Vec<u64> {
        let seen = self.seen.lock().expect("no panic");
        assert!(seen.iter().map(|event| event.seq).eq(0..seen.len() as u64));
        seen.iter().map(|event| event.host_ns).collect()
    }

    fn finish(&mut self) {
        let limit = 1000;
        let over = (0..limit).any(|_| self.pass(true) == PassResult::Nothing);
        assert!(over, "there is more after {limit} passes");
    }
}

#[test]
fn an_event_that_is_seen_a_pass_late_comes_before_those_that_are_newer() {
    let mut rig = Rig::new(2, 1, 64);
    rig.push(0, 10);
    assert_eq!(rig.pass(false), PassResult::Held);
    rig.push(1, 5);
    rig.sources[0].push(event(2, 7));
    assert_eq!(rig.pass(false), PassResult::All { of_rings: true });
    assert_eq!(rig.times(), [5, 7, 10]);
    assert_eq!(rig.pass(false), PassResult::Nothing);
}

#[test]
fn what_is_held_is_handed_on_when_nothing_new_comes() {
    let mut rig = Rig::new(2, 0, 64);
    rig.push(0, 10);
    assert_eq!(rig.pass(false), PassResult::Held);
    assert_eq!(rig.times(), [0; 0]);
    assert_eq!(rig.pass(false), PassResult::All { of_rings: true });
    assert_eq!(rig.times(), [10]);
}

#[test]
fn what_was_held_at_a_bad_moment_takes_no_room_later() {
    let mut rig = Rig::new(2, 1, 64);
    rig.push(0, 1);
    rig.pass(false);
    // The thread of the other vCPU is preempted during a hit.
    rig.turns[1] += 1;
    for round in 0..8 {
        let times = (0..BATCH as u64).map(|n| 10 + round * BATCH as u64 + n);
        rig.sources[0].extend(times.map(|time| event(2, time)));
        rig.pass(false);
    }
    assert!(rig.order.pending.len() > 2 * BATCH);
    rig.turns[1] += 1;
    let passes = (0..100).take_while(|_| rig.pass(false) != PassResult::Nothing);
    assert!(passes.count() < 100);
    assert_eq!(rig.times().len(), 8 * BATCH + 1);
    assert!(rig.order.pending.capacity() <= BATCH);
}

#[test]
fn nothing_overtakes_a_hit_whose_thread_is_kept_from_reporting() {
    let mut rig = Rig::new(2, 1, 64);
    rig.push(0, 10);
    assert_eq!(rig.pass(false), PassResult::Held);
    // The event of this hit will have the time 11.
    rig.turns[1] += 1;
    for time in 20..30 {
        rig.push(0, time);
        rig.sources[0].push(event(2, time));
        assert_eq!(rig.pass(false), PassResult::Held);
    }
    // It is still held when nothing else comes.
    assert_eq!(rig.pass(false), PassResult::Held);
    rig.push(1, 11);
    rig.turns[1] += 1;
    assert_eq!(rig.pass(false), PassResult::All { of_rings: true });
    let times = rig.times();
    assert!(times.is_sorted(), "{times:?}");
    assert_eq!(times.len(), 22);
}

#[test]
fn hits_without_a_pause_let_older_events_go() {
    let mut rig = Rig::new(2, 0, 4096);
    for time in 1..100 {
        rig.push(0, 10 * time);
        rig.turns[1] += 2;
        rig.turns[1] |= 1;
        rig.pass(false);
    }
    assert!(rig.times().len() >= 97, "{:?}", rig.times());
}

#[test]
fn nothing_overtakes_what_a_source_keeps_back_or_has_left_for_later() {
    let mut rig = Rig::new(1, 1, 4096);
    rig.keeps_back = true;
    for time in 10..20 {
        rig.push(0, time);
        assert_eq!(rig.pass(false), PassResult::Held);
    }
    rig.keeps_back = false;
    rig.sources[0].extend((0..2000).map(|n| event(1, 5 + n / 1000)));
    while rig.pass(false) == PassResult::Part {}
    rig.finish();
    let times = rig.times();
    assert!(times.is_sorted(), "{times:?}");
    assert_eq!(times.len(), 2010);
}

#[test]
fn a_ring_that_fills_is_not_held_until_events_are_lost() {
    let mut rig = Rig::new(2, 1, 16);
    rig.keeps_back = true;
    for time in 1..=100 {
        rig.push(0, time);
        rig.pass(false);
    }
    rig.finish();
    assert!(rig.times().iter().copied().eq(1..=100));
}

#[test]
fn an_event_without_a_time_stays_behind_the_one_it_came_after() {
    let mut rig = Rig::new(1, 1, 16);
    rig.sources[0] = [20, 0, 30, 0].map(|time| event(1, time)).to_vec();
    rig.push(0, 25);
    rig.finish();
    assert_eq!(rig.times(), [20, 0, 25, 30, 0]);
}

/// Returns an event whose time is not known, except that it came after `after`.
fn timeless(after: u64) -> Event {
    Event {
        seq: after,
        ..event(1, 0)
    }
}

#[test]
fn an_event_without_a_time_comes_behind_what_it_is_known_to_have_come_after() {
    let mut rig = Rig::new(1, 1, 16);
    rig.sources[0] = vec![timeless(26), event(1, 30), timeless(22), timeless(33)];
    for time in [25, 31, 35] {
        rig.push(0, time);
    }
    rig.finish();
    assert_eq!(rig.times(), [25, 0, 30, 0, 31, 0, 35]);
}

#[test]
fn an_event_without_a_time_is_held_with_what_it_came_after() {
    let mut rig = Rig::new(1, 1, 16);
    rig.push(0, 20);
    rig.pass(false);
    rig.sources[0] = vec![timeless(30)];
    assert_eq!(rig.pass(false), PassResult::Held);
    let held = Held {
        oldest: 30,
        newest: 30,
    };
    assert_eq!(rig.order.held(), Some(held));
    // The event that it follows is seen only now.
    rig.push(0, 29);
    rig.finish();
    assert_eq!(rig.times(), [20, 29, 0]);
}

proptest! {
    /// Events happen one after another. Each is visible at once or, if `is_late` is set, at the latest to the
    /// second pass after it.
    #[test]
    fn events_that_are_not_later_than_a_pass_are_handed_on_in_order(
        events in prop::collection::vec((0_usize..5, 0_u64..3, any::<bool>(), 0_u8..4), 1..400),
        capacity in 1_usize..800,
    ) {
        let mut rig = Rig::new(3, 2, capacity.max(64) * 16);
        let (mut now, mut expected) = (1, Vec::new());
        // Events that have happened and cannot be seen yet.
        let mut late = Vec::new();
        let show = |rig: &mut Rig, of: usize, time| match of.checked_sub(3) {
            None => rig.push(of, time),
            Some(source) => rig.sources[source].push(event(9, time)),
        };
        for (of, apart, is_late, passes) in events {
            now += apart;
            expected.push(now);
            let is_behind = late.iter().any(|(other, _)| *other == of);
            if is_late || is_behind {
                late.push((of, now));
            } else {
                show(&mut rig, of, now);
            }
            for _ in 0..passes {
                // Late events become visible during the pass, which may or may not see them.
                rig.pass(false);
                for (of, time) in late.drain(..) {
                    show(&mut rig, of, time);
                }
            }
        }
        for (of, time) in late {
            show(&mut rig, of, time);
        }
        rig.finish();
        prop_assert_eq!(rig.times(), expected);
    }
}
