//! The ring without a guest: records as a detour writes them, and as one that means no good would.

use hvprobe_arch::detour::Capture;
use hvprobe_arch::regs::RegisterSet;
use proptest::prelude::*;

use super::*;
use crate::hidden::detours::CounterPlace;
use crate::testing::Memory;

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

struct Rig {
    mem: Memory,
    reader: Reader,
    counters: Arc<Counters>,
}

impl Rig {
    fn new() -> Self {
        let sources = Sources::default();
        let counters = Arc::new(Counters::new(2));
        let what = What {
            at: AT,
            capture: Capture {
                registers: RegisterSet::from_iter([]),
                stack: Vec::new(),
                task: None,
                cpu: None,
            },
            followed: None,
        };
        let tallies = Tallies {
            lost: LOST,
            vetoed: VETOED,
            missed: MISSED,
        };
        let words = CounterPlace::at(Gva(0));
        let source = Source::new(
            PROBE,
            what,
            Arc::default(),
            Arc::clone(&counters),
            words,
            tallies,
        );
        sources.add(Arc::new(source.expect("a layout")));
        let place = RingPlace {
            head: HEAD,
            limit: LIMIT,
            bell: BELL,
            cells: CELLS,
            capacity: CAPACITY,
            watermark: WATERMARK,
        };
        Self {
            mem: Memory::new(0),
            reader: Reader::new(place, sources),
            counters,
        }
    }

    /// Writes a record of one cell at `position`, as complete as `published` says.
    fn record(&self, position: u64, source: u32, tsc: u64, published: bool) {
        let cell = position & u64::from(CAPACITY - 1);
        let at = CELLS.wrapping_add(cell * CELL as u64);
        let mut bytes = [0; CELL];
        bytes[8..12].copy_from_slice(&source.to_le_bytes());
        bytes[11] = 1;
        bytes[16..24].copy_from_slice(&tsc.to_le_bytes());
        if published {
            bytes[..8].copy_from_slice(&(position + 1).to_le_bytes());
        }
        self.mem.write(at, &bytes).expect("in memory");
        self.mem.write_u64(HEAD, position + 1).expect("in memory");
    }

    fn read(&mut self, limit: usize) -> (Vec<u64>, u64) {
        let mut events = Vec::new();
        let drained = self
            .reader
            .read(&self.mem, |tsc| tsc * 10, limit, &mut events);
        let times = events.iter().map(|event| {
            assert_eq!((event.probe, event.regs.rip), (PROBE, AT.0));
            assert_eq!(event.host_ns, event.guest_tsc * 10);
            event.guest_tsc
        });
        (times.collect(), drained.lost)
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
        let told = [LIMIT, BELL].map(|at| rig.mem.read_u64(at).expect("in memory"));
        assert_eq!(
            told,
            [tail + u64::from(CAPACITY), tail + u64::from(WATERMARK)]
        );
    }
    assert_eq!(rig.counters.sum().hits, 100);
}

#[test]
fn a_record_that_is_not_complete_holds_those_behind_it_back() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 1, false);
    rig.record(1, PROBE.0, 2, true);
    assert_eq!(rig.read(99), (Vec::new(), 0));
    rig.record(0, PROBE.0, 1, true);
    rig.mem.write_u64(HEAD, 2).unwrap();
    assert_eq!(rig.read(99), (vec![1, 2], 0));
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
    rig.mem.write(CELLS.wrapping_add(11), &[0xff]).unwrap();
    rig.record(1, PROBE.0, 2, true);
    let (events, lost) = rig.read(99);
    assert!(events.is_empty() && lost > 0);
    // From then on the ring is as good as new.
    rig.record(2, PROBE.0, 3, true);
    assert_eq!(rig.read(99), (vec![3], 0));
}

#[test]
fn a_record_that_claims_another_place_ends_what_can_be_understood() {
    let mut rig = Rig::new();
    rig.record(0, PROBE.0, 1, true);
    rig.mem.write_u64(CELLS, 77).unwrap();
    let (events, lost) = rig.read(99);
    assert!(events.is_empty() && lost > 0);
    rig.record(1, PROBE.0, 2, true);
    assert_eq!(rig.read(99), (vec![2], 0));
}

#[test]
fn what_is_only_counted_is_accounted_for_once() {
    let rig = Rig::new();
    for (at, count) in [(LOST, 5), (VETOED, 6), (MISSED, 7)] {
        rig.mem.write_u64(at, count).unwrap();
    }
    assert_eq!(rig.reader.settle(&rig.mem), 5);
    assert_eq!(rig.reader.settle(&rig.mem), 0);
    let counts = rig.counters.sum();
    assert_eq!((counts.hits, counts.vetoed, counts.missed), (5, 6, 7));
}

#[test]
fn catching_up_leaves_the_events_to_the_collector() {
    let rig = Rig::new();
    for n in 0..3 {
        rig.record(n, PROBE.0, n, true);
    }
    let collection = Collection::new(rig.reader);
    assert!(collection.patience().is_some());
    collection.catch_up(&rig.mem, |tsc| tsc);
    assert_eq!(rig.counters.sum().hits, 3);
    let mut batch = Vec::new();
    let mut drain = || collection.drain(&rig.mem, |tsc| tsc, &mut batch, 2);
    assert_eq!(drain(), drained(0, true));
    assert_eq!(drain(), drained(0, false));
    assert_eq!(batch.len(), 3);
}

fn drained(lost: u64, more: bool) -> Drained {
    Drained { lost, more }
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
        let said = collection.drain(&rig.mem, |tsc| tsc, &mut batch, 2);
        (said, batch.len())
    };
    assert_eq!(drain(), (drained(2, true), 0));
    assert_eq!(drain(), (drained(2, true), 0));
    assert_eq!(drain(), (drained(0, false), 1));
}

proptest! {
    #[test]
    fn nothing_a_guest_writes_harms_more_than_its_own_events(
        words in prop::collection::vec(any::<u64>(), 0..200),
        head in prop_oneof![any::<u64>(), 0..100_u64],
        sound in any::<u64>(),
    ) {
        let mut rig = Rig::new();
        for (n, word) in (0..).zip(&words) {
            rig.mem.write_u64(CELLS.wrapping_add(n * 8), *word).unwrap();
        }
        // A record that looks begun.
        rig.mem.write_u64(CELLS, 1).unwrap();
        rig.mem.write_u64(CELLS.wrapping_add(8), sound).unwrap();
        rig.mem.write_u64(HEAD, head).unwrap();
        let mut events = Vec::new();
        for _ in 0..4 {
            rig.reader.read(&rig.mem, |tsc| tsc, 1000, &mut events);
        }
        prop_assert!(events.len() <= 4000);
    }
}
