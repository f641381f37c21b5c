//! Tests of the ring without a guest: with records as a detour writes them, and as a hostile guest would.

mod tallies;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_arch::detour::{CELL, Capture};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::RegisterSet;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_fixtures::Memory;
use hvprobe_spec::predicate::Predicate;
use hvprobe_spec::{Actions, Item, ProbeId};

use super::collection::SETTLE;
use super::reader::Look;
use super::source::PLAUSIBLE;
use super::*;
use crate::counters::Counters;
use crate::event::{Drained, Event, Headroom};
use crate::region::{CounterPlace, RingPlace};

mod model;
mod nested;
mod work;

const CAPACITY: u32 = 32;
const HEAD: Gpa = Gpa(0x1000);
const LIMIT: Gpa = Gpa(0x1040);
const BELL: Gpa = Gpa(0x1048);
const WATERMARK: u32 = 8;
const LOST: Gpa = Gpa(0x1080);
const VETOED: Gpa = Gpa(0x1088);
const MISSED: Gpa = Gpa(0x1090);
const CELLS: Gpa = Gpa(0x2000);
const PROBE: ProbeId = ProbeId(7);
const AT: Gva = Gva(0xffff_ffff_8100_0000);

const PLACE: RingPlace = RingPlace {
    head: HEAD,
    limit: LIMIT,
    bell: BELL,
    cells: CELLS,
    capacity: CAPACITY,
    watermark: WATERMARK,
};

/// Returns a source of records that hold `capture`.
fn source(probe: ProbeId, capture: Capture, counters: &Arc<Counters>) -> Arc<RecordSource> {
    filtered(probe, capture, counters, None)
}

fn filtered(
    probe: ProbeId,
    capture: Capture,
    counters: &Arc<Counters>,
    filter: Option<Predicate>,
) -> Arc<RecordSource> {
    let what = What {
        at: AT,
        number: probe.0,
        capture,
        followed: None,
    };
    let tallies = Tallies {
        lost: LOST,
        vetoed: VETOED,
        missed: MISSED,
    };
    let words = CounterPlace(Gva(0));
    let counters = Arc::clone(counters);
    let stack = what.capture.stack.iter().copied();
    let actions = Arc::new(Actions {
        capture: stack.map(Item::Stack).collect(),
        filter,
        ..Actions::default()
    });
    let source = RecordSource::new(probe, what, actions, counters, words, tallies);
    Arc::new(source.expect("a layout"))
}

struct Rig {
    mem: Memory,
    reader: Reader,
    counters: Arc<Counters>,
    now: Instant,
}

impl Rig {
    fn new() -> Self {
        let sources = RecordSources::default();
        let counters = Arc::new(Counters::new(2));
        let capture = Capture {
            registers: RegisterSet::from_iter([]),
            ..Capture::default()
        };
        sources.add(source(PROBE, capture, &counters));
        let mem = Memory::new(0);
        let (limit, bell) = PLACE.initial();
        PLACE.publish(&mem, limit, bell).expect("in memory");
        Self {
            mem,
            reader: Reader::new(PLACE, sources),
            counters,
            now: Instant::now(),
        }
    }

    /// Writes a record of one cell at `position`: begun, and `finished` or not.
    fn record(&self, position: u64, source: u32, tsc: u64, finished: bool) {
        let cell = position & u64::from(CAPACITY - 1);
        let at = CELLS.wrapping_add(cell * CELL as u64);
        let mut bytes = [0; CELL];
        bytes[8..16].copy_from_slice(&tsc.to_le_bytes());
        if finished {
            let mark = u64::from(source | 1 << 24) << 32 | (position + 1) & 0xffff_ffff;
            bytes[..8].copy_from_slice(&mark.to_le_bytes());
        }
        self.mem.write(at, &bytes).expect("in memory");
        let head = self.mem.read_u64(HEAD).expect("in memory");
        let head = head.max(position + 1);
        self.mem.write_u64(HEAD, head).expect("in memory");
    }

    fn read(&mut self, limit: usize) -> (Vec<u64>, u64) {
        self.look(Look::patient(limit, self.now))
    }

    fn look(&mut self, look: Look) -> (Vec<u64>, u64) {
        let mut events = Vec::new();
        let drained = self.reader.read(
            &self.mem,
            |at: Stamp| When::At(at.tsc * 10),
            look,
            &mut events,
        );
        let times = events.iter().map(|event| {
            assert_eq!((event.probe, event.regs.rip), (PROBE, AT.0));
            assert_eq!(event.host_ns, event.guest_tsc * 10);
            event.guest_tsc
        });
        (times.collect(), drained.lost)
    }

    fn pass_ms(&mut self, milliseconds: u64) {
        self.now += Duration::from_millis(milliseconds);
    }

    /// Returns limit and bell.
    fn published(&self) -> [u64; 2] {
        [LIMIT, BELL].map(|at| self.mem.read_u64(at).expect("in memory"))
    }
}

#[test]
fn a_call_whose_times_had_to_be_put_in_order_does_not_say_how_long_it_took() {
    use super::source::call_times;
    const RETURN: u64 = 1_000_000;
    for (returned, entry, expected) in [
        (When::At(RETURN), 999_999, (RETURN, 999_999)),
        // The return is earlier than the entry, first by a plausible difference of the processors' clocks, then by
        // more than that.
        (When::At(RETURN), 1_080_744, (1_080_744, 0)),
        (When::At(RETURN), 1_200_001, (0, 1_200_001)),
        // Placed just after its entry, and at the time of its entry.
        (When::Placed(RETURN), 999_999, (RETURN, 0)),
        (When::Placed(RETURN), RETURN, (RETURN, 0)),
        // A call that took longer than any time can be off, and a return that was placed before its entry.
        (When::Placed(RETURN), 799_999, (RETURN, 799_999)),
        (When::Placed(RETURN), 1_080_744, (1_080_744, 0)),
        // One of the times is not known.
        (When::After(RETURN), 100, (0, 100)),
        (When::At(RETURN), 0, (RETURN, 0)),
    ] {
        assert_eq!(
            call_times(returned, entry),
            expected,
            "{returned:?} of {entry}"
        );
    }
}

#[test]
fn records_are_read_once_in_their_order_around_the_end_of_the_ring() {
    let mut rig = Rig::new();
    for lap in 0..5 {
        for n in 0..20 {
            rig.record(lap * 20 + n, PROBE.0, lap * 20 + n, true);
        }
        assert_eq!(rig.read(7).0, (lap * 20..lap * 20 + 7).collect::<Vec<_>>());
        assert_eq!(
            rig.read(99).0,
            (lap * 20 + 7..lap * 20 + 20).collect::<Vec<_>>()
        );
        assert_eq!(rig.read(99), (Vec::new(), 0));
        let tail = lap * 20 + 20;
        assert_eq!(
            rig.published(),
            [tail + u64::from(CAPACITY), tail + u64::from(WATERMARK)]
        );
    }
    assert_eq!(rig.counters.sum().hits, 100);
}

#[test]
fn a_record_that_is_not_finished_is_waited_for_and_then_stepped_over() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 1, false);
    rig.record(1, PROBE.0, 2, true);
    assert_eq!(rig.read(99), (Vec::new(), 0));
    rig.pass_ms(5);
    rig.record(0, PROBE.0, 1, true);
    assert_eq!(rig.read(99), (vec![1, 2], 0));

    rig.record(2, PROBE.0, 3, false);
    rig.record(3, PROBE.0, 4, true);
    assert_eq!(rig.read(99), (Vec::new(), 0));
    rig.pass_ms(19);
    // Younger than the record that is waited for: the wait for this one begins when its turn comes.
    rig.record(4, PROBE.0, 5, false);
    rig.record(5, PROBE.0, 6, true);
    assert_eq!(rig.read(99), (Vec::new(), 0));
    rig.pass_ms(1);
    assert_eq!(rig.read(99), (vec![4], 0));
    rig.pass_ms(19);
    assert_eq!(rig.read(99), (Vec::new(), 0));
    rig.pass_ms(1);
    assert_eq!(rig.read(99), (vec![6], 0));
    // Finished at last, they are delivered all the same, the older one first.
    rig.record(4, PROBE.0, 5, true);
    rig.record(2, PROBE.0, 3, true);
    assert_eq!(rig.read(99), (vec![3, 5], 0));
    assert_eq!(rig.counters.sum().hits, 6);
    assert!(!rig.reader.awaits());
}

#[test]
fn whoever_needs_all_there_is_waits_for_nothing() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 1, false);
    rig.record(1, PROBE.0, 2, true);
    rig.record(2, PROBE.0, 3, false);
    assert_eq!(rig.look(Look::at_all(99)), (vec![2], 0));
    assert!(rig.reader.awaits());
    rig.record(2, PROBE.0, 3, true);
    assert_eq!(rig.look(Look::at_all(99)), (vec![3], 0));
    rig.record(0, PROBE.0, 1, true);
    assert_eq!(rig.look(Look::at_all(99)), (vec![1], 0));
    assert!(!rig.reader.awaits());
}

#[test]
fn nothing_is_waited_for_once_a_quarter_of_the_ring_is_full() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 0, false);
    for n in 1..8 {
        rig.record(n, PROBE.0, n, true);
    }
    assert_eq!(rig.read(99), (Vec::new(), 0));
    rig.record(8, PROBE.0, 8, true);
    assert_eq!(rig.read(99), ((1..=8).collect(), 0));
}

#[test]
fn a_record_that_is_never_finished_does_not_fill_the_ring() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 0, false);
    let mut read = Vec::new();
    let (mut recorded, mut full) = (0, 0);
    for _ in 0..1000 {
        // As detours do.
        for _ in 0..5 {
            let head = rig.mem.read_u64(HEAD).unwrap();
            if head < rig.published()[0] {
                assert_ne!(head % u64::from(CAPACITY), 0, "somebody else's");
                recorded += 1;
                rig.record(head, PROBE.0, recorded, true);
            } else {
                full += 1;
            }
        }
        rig.pass_ms(5);
        let (events, lost) = rig.read(99);
        assert_eq!(lost, 0);
        read.extend(events);
    }
    rig.pass_ms(50);
    read.extend(rig.read(99).0);
    assert_eq!(read, (1..=recorded).collect::<Vec<_>>());
    assert_eq!((recorded, full), (5000, 0));
    // The record that was stepped over is finished after all.
    let head = rig.mem.read_u64(HEAD).unwrap();
    rig.record(0, PROBE.0, 0, true);
    assert_eq!(rig.read(99), (vec![0], 0));
    assert_eq!(rig.mem.read_u64(HEAD), Ok(head));
    assert_eq!(rig.published()[0], head + u64::from(CAPACITY));
}

#[test]
fn what_is_not_finished_when_the_guest_ends_is_reported() {
    let rig = Rig::new();
    for n in 0..4 {
        rig.record(n, PROBE.0, n, n % 2 == 1);
    }
    rig.record(4, PROBE.0, 4, false);
    let collection = Collection::new(rig.reader);
    collection.end(&rig.mem, |at: Stamp| When::At(at.tsc));
    let mut batch = Vec::new();
    let mut drain = || collection.drain(&rig.mem, |at: Stamp| When::At(at.tsc), &mut batch, 99);
    assert_eq!(drain(), drained(3, false));
    assert_eq!(drain(), drained(0, false));
    assert_eq!(batch.len(), 2);
}

#[test]
fn what_was_read_ahead_takes_no_room_once_it_was_handed_on() {
    let rig = Rig::new();
    for n in 0..4 {
        rig.record(n, PROBE.0, n, true);
    }
    let collection = Collection::new(rig.reader);
    collection.catch_up(&rig.mem, |at: Stamp| When::At(at.tsc));
    let mut batch = Vec::new();
    let mut drain =
        |most| collection.drain(&rig.mem, |at: Stamp| When::At(at.tsc), &mut batch, most);
    assert_eq!(drain(3), drained(0, true));
    assert!(collection.kept() > 0);
    assert_eq!(drain(3), drained(0, false));
    assert_eq!(collection.kept(), 0);
    assert_eq!(batch.len(), 4);
}

#[test]
fn a_record_is_timed_by_where_it_is_however_late_it_is_finished() {
    let mut rig = Rig::new();
    for position in 0..4 {
        rig.record(position, PROBE.0, position, position != 1);
    }
    let look = |rig: &mut Rig| {
        let mut events = Vec::new();
        let when = |at: Stamp| When::At(100 + at.position.expect("it is a record"));
        rig.reader
            .read(&rig.mem, when, Look::at_all(9), &mut events);
        let times = events.iter().map(|event| event.host_ns);
        times.collect::<Vec<_>>()
    };
    assert_eq!(look(&mut rig), [100, 102, 103]);
    rig.record(1, PROBE.0, 1, true);
    assert_eq!(look(&mut rig), [101]);
}

#[test]
fn a_record_whose_time_is_unknown_keeps_its_place() {
    let mut rig = Rig::new();
    for position in 0..5 {
        rig.record(position, PROBE.0, 10 * position, true);
    }
    let when = |at: Stamp| match at.position {
        Some(1) => When::After(70),
        Some(2) => When::After(120),
        Some(position) => When::At(100 + position),
        None => When::After(0),
    };
    let mut events = Vec::new();
    rig.reader
        .read(&rig.mem, when, Look::at_all(9), &mut events);
    let places: Vec<_> = events[..4]
        .iter()
        .map(|event| (event.host_ns, event.seq))
        .collect();
    // The time of the record before it, or the lower bound for its own time if that is later.
    let [_, (0, 100), (0, 120), _] = places[..] else {
        panic!("{places:?}");
    };
    assert_eq!(places[3].0, 103);
}

#[test]
fn records_of_nobody_are_lost_and_counted() {
    let mut rig = Rig::new();
    rig.record(0, 99, 1, true);
    rig.record(1, PROBE.0, 2, true);
    assert_eq!(rig.read(99), (vec![2], 1));
}

#[test]
fn a_record_of_an_impossible_length_ends_what_can_be_understood() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 1, true);
    rig.mem.write(CELLS.wrapping_add(7), &[0xff]).unwrap();
    rig.record(1, PROBE.0, 2, true);
    let (events, lost) = rig.read(99);
    assert_eq!(events, [2]);
    assert!(lost > 0);
    // After that the ring works as before.
    let head = rig.mem.read_u64(HEAD).unwrap();
    rig.record(head, PROBE.0, 3, true);
    assert_eq!(rig.read(99), (vec![3], 0));
}

#[test]
fn a_record_that_claims_another_place_ends_what_can_be_understood() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 1, true);
    rig.mem.write(CELLS, &77_u32.to_le_bytes()).unwrap();
    let (events, lost) = rig.read(99);
    assert!(events.is_empty() && lost > 0);
    let head = rig.mem.read_u64(HEAD).unwrap();
    rig.record(head, PROBE.0, 2, true);
    assert_eq!(rig.read(99), (vec![2], 0));
}

#[test]
fn a_head_where_no_detour_can_have_moved_it_is_put_right() {
    for nonsense in [33, 4000, 1 << 63, u64::MAX] {
        let mut rig = Rig::new();
        rig.record(0, PROBE.0, 1, true);
        rig.mem.write_u64(HEAD, nonsense).unwrap();
        let (events, lost) = rig.read(99);
        assert!(events.is_empty() && lost > 0, "{nonsense:#x}");
        let head = rig.mem.read_u64(HEAD).unwrap();
        assert_eq!(rig.published()[0], head + u64::from(CAPACITY));
        rig.record(head, PROBE.0, 2, true);
        assert_eq!(rig.read(99), (vec![2], 0));
    }
}

#[test]
fn catching_up_leaves_the_events_to_the_collector() {
    let rig = Rig::new();
    for n in 0..3 {
        rig.record(n, PROBE.0, n, true);
    }
    let collection = Collection::new(rig.reader);
    assert!(collection.patience().is_some());
    collection.catch_up(&rig.mem, |at: Stamp| When::At(at.tsc));
    assert_eq!(rig.counters.sum().hits, 3);
    let mut batch = Vec::new();
    let mut drain = || collection.drain(&rig.mem, |at: Stamp| When::At(at.tsc), &mut batch, 2);
    assert_eq!(drain(), drained(0, true));
    assert_eq!(drain(), drained(0, false));
    assert_eq!(batch.len(), 3);
}

fn drained(lost: u64, more: bool) -> Drained {
    Drained {
        lost,
        more,
        keeps_back: false,
    }
}

#[test]
fn records_that_are_no_events_do_not_hide_those_behind_them() {
    let rig = Rig::new();
    for n in 0..4 {
        rig.record(n, 99, n, true);
    }
    rig.record(4, PROBE.0, 4, true);
    let collection = Collection::new(rig.reader);
    let mut batch = Vec::new();
    let mut drain = || {
        let said = collection.drain(&rig.mem, |at: Stamp| When::At(at.tsc), &mut batch, 2);
        (said, batch.len())
    };
    assert_eq!(drain(), (drained(2, true), 0));
    assert_eq!(drain(), (drained(2, true), 0));
    assert_eq!(drain(), (drained(0, false), 1));
}

#[test]
fn what_a_probe_that_has_left_has_begun_is_reported_when_it_is_finished() {
    let rig = Rig::new();
    rig.record(0, PROBE.0, 0, false);
    let sources = rig.reader.sources.clone();
    let Rig { mem, reader, .. } = rig;
    let collection = Collection::new(reader);
    collection.catch_up(&mem, |at: Stamp| When::At(at.tsc));
    sources.remove(PROBE);
    assert_eq!(collection.patience(), Some(SETTLE));
    let drain = || collection.drain(&mem, |at: Stamp| When::At(at.tsc), &mut Vec::new(), 99);
    // Events that other sources made meanwhile may be younger.
    let waiting = Drained {
        keeps_back: true,
        ..drained(0, false)
    };
    assert_eq!(drain(), waiting);
    assert_eq!(collection.patience(), Some(SETTLE));
    let rig = Rig {
        mem: mem.clone(),
        ..Rig::new()
    };
    rig.record(0, PROBE.0, 0, true);
    assert_eq!(drain(), drained(1, false));
    assert_eq!(collection.patience(), None);
}

#[test]
fn what_is_finished_late_waits_in_its_place() {
    let Rig {
        mem,
        reader,
        counters,
        now,
    } = Rig::new();
    let collection = Collection::new(reader);
    let rig = Rig {
        reader: Reader::new(PLACE, RecordSources::default()),
        mem,
        counters,
        now,
    };
    for n in 0..3 {
        rig.record(n, PROBE.0, n, n != 1);
    }
    collection.catch_up(&rig.mem, |at: Stamp| When::At(at.tsc));
    assert_eq!(rig.counters.sum().hits, 2);
    rig.record(1, PROBE.0, 1, true);
    rig.record(3, PROBE.0, 3, true);
    collection.catch_up(&rig.mem, |at: Stamp| When::At(at.tsc));
    assert_eq!(rig.counters.sum().hits, 4);
    let mut batch = Vec::new();
    collection.drain(&rig.mem, |at: Stamp| When::At(at.tsc), &mut batch, 99);
    let times: Vec<u64> = batch.iter().map(|event| event.guest_tsc).collect();
    assert_eq!(times, [0, 1, 2, 3]);
}

#[test]
fn record_that_is_finished_after_its_probe_was_disabled_is_a_hit_without_an_event() {
    let mut rig = Rig::new();
    let source = rig.reader.sources.get(PROBE).expect("added");
    for n in 0..2 {
        rig.record(n, PROBE.0, n, n == 0);
    }
    // The probe is disabled and its records are read. Nothing more is expected.
    source.set_enabled(false);
    assert!(source.is_to_be_silenced());
    assert_eq!(rig.read(99), (vec![0], 0));
    source.silence();
    assert!(!source.is_to_be_silenced());
    rig.record(1, PROBE.0, 1, true);
    assert_eq!(rig.read(99), (Vec::new(), 0));
    assert_eq!((rig.counters.sum().hits, rig.counters.sum().missed), (2, 0));
    assert_eq!(rig.reader.settle(&rig.mem), 1);
    assert_eq!(rig.reader.settle(&rig.mem), 0);
    // When it is enabled again, it makes events.
    source.set_enabled(true);
    source.silence();
    rig.record(2, PROBE.0, 2, true);
    assert_eq!(rig.read(99), (vec![2], 0));
    assert_eq!(rig.counters.sum().hits, 3);
}

#[test]
fn there_is_as_much_room_as_detours_find() {
    let rig = Rig::new();
    let room = |head: u64, limit: u64| {
        rig.mem.write_u64(HEAD, head).expect("in memory");
        rig.mem.write_u64(LIMIT, limit).expect("in memory");
        PLACE.room(&rig.mem).expect("in memory")
    };
    assert_eq!(room(0, 32), Headroom::Plenty);
    assert_eq!(room(100, 116), Headroom::Plenty);
    assert_eq!(room(116, 116), Headroom::None);
    // A ring of 32 cells is never `Scant`, because half of it is enough for any record.
    assert_eq!(Headroom::of(17, 64, 16), Headroom::Scant);
    assert_eq!(Headroom::of(15, 64, 16), Headroom::None);
    // What no detour writes.
    assert_eq!(room(7, 3), Headroom::None);
    let nowhere = RingPlace {
        limit: Gpa(u64::MAX - 7),
        ..PLACE
    };
    assert!(nowhere.room(&rig.mem).is_err());
}
