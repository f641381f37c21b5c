//! Hits that detours count without a record, and how the host accounts for them.

use super::*;

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
fn hits_that_no_filter_was_asked_about_are_missed() {
    let rig = Rig::new();
    let capture = Capture {
        registers: RegisterSet::from_iter([]),
        ..Capture::default()
    };
    let filter = Predicate::All(Vec::new());
    let source = filtered(PROBE, capture, &rig.counters, Some(filter));
    for (at, count) in [(LOST, 5), (VETOED, 6), (MISSED, 7)] {
        rig.mem.write_u64(at, count).unwrap();
    }
    assert_eq!(source.settle(&rig.mem), 5);
    let counts = rig.counters.sum();
    assert_eq!((counts.hits, counts.vetoed, counts.missed), (0, 6, 12));
}

#[test]
fn counts_that_cannot_be_are_not_counted() {
    let rig = Rig::new();
    let (mut word, mut seen) = (0_u64, 0);
    for added in [3, u64::MAX, 1 << 63, PLAUSIBLE + 1, PLAUSIBLE, 4] {
        word = word.wrapping_add(added);
        for at in [LOST, VETOED, MISSED] {
            rig.mem.write_u64(at, word).unwrap();
        }
        let plausible = if added <= PLAUSIBLE { added } else { 0 };
        assert_eq!(rig.reader.settle(&rig.mem), plausible, "{added:#x}");
        seen += plausible;
    }
    let counts = rig.counters.sum();
    assert_eq!(
        (counts.hits, counts.vetoed, counts.missed),
        (seen, seen, seen)
    );
    rig.counters.hit(1);
    rig.counters.add_hits(u64::MAX - seen);
    assert_eq!(rig.counters.sum().hits, u64::MAX);
}
