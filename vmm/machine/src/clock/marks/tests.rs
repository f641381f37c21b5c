use std::thread;

use proptest::prelude::*;

use super::*;

proptest! {
    /// Hits and records in a sequence, each later than the one before. For any time that is guessed for a record,
    /// the result lies between the hits around it.
    #[test]
    fn a_record_is_placed_between_the_hits_around_it(
        steps in prop::collection::vec((any::<bool>(), 1..5_u64), 1..3000),
        guesses in prop::collection::vec(any::<prop::sample::Index>(), 100),
    ) {
        let marks = Marks::default();
        let (mut head, mut ns) = (0, 1000);
        let (mut records, mut hits) = (Vec::new(), Vec::new());
        for (is_hit, step) in steps {
            ns += 10;
            if is_hit {
                marks.note(head, ns);
                hits.push(ns);
            } else {
                records.push((head, ns));
                head += step;
            }
        }
        for guess in guesses {
            let Some((position, at)) = records.get(guess.index(records.len().max(1))) else {
                continue;
            };
            let is_before = |hit: &u64| hit < at;
            let behind = hits.partition_point(is_before);
            // The oldest marks may have been overwritten.
            let is_kept = hits.len() - behind < KEPT / 2;
            let bounds = [0, u64::MAX].map(|guess| marks.between(*position, guess));
            match behind.checked_sub(1).and_then(|n| hits.get(n)) {
                Some(before) if is_kept => prop_assert_eq!(bounds[0], before + 1),
                Some(before) => prop_assert!(bounds[0] <= before + 1),
                None => prop_assert_eq!(bounds[0], 0),
            }
            match hits.get(behind) {
                Some(behind) if is_kept => prop_assert_eq!(bounds[1], behind - 1),
                Some(behind) => prop_assert!(bounds[1] >= behind - 1),
                None => prop_assert_eq!(bounds[1], u64::MAX),
            }
            prop_assert_eq!(marks.between(*position, *at), *at);
        }
    }
}

#[test]
fn what_is_read_while_marks_are_written_is_true() {
    const RECORDS: u64 = 200_000;
    let marks = Marks::default();
    // A record at every position, with a hit right before and right after it.
    let hit = |position: u64| position * 10 + 5;
    let record = |position: u64| position * 10 + 10;
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for position in 0..RECORDS {
                marks.note(position, hit(position));
            }
        });
        let mut position = 0;
        while !writer.is_finished() {
            position = (position + 7919) % RECORDS;
            let at = record(position);
            assert_eq!(marks.between(position, at), at);
            let written = marks.written.load(Ordering::Relaxed);
            let newest = written.saturating_sub(1);
            let time = marks.between(newest, 0);
            assert!(time <= record(newest), "{time} of {newest}");
        }
    });
    assert_eq!(marks.between(RECORDS - 2, 0), hit(RECORDS - 2) + 1);
    // The marks around it have been overwritten, so any time is possible.
    assert_eq!(marks.between(5, 0), 0);
}

#[test]
fn a_head_that_the_guest_has_moved_is_no_trouble() {
    let marks = Marks::default();
    for (head, ns) in [(5, 50), (u64::MAX, 60), (0, 70), (1 << 63, 80), (7, 90)] {
        marks.note(head, ns);
    }
    for position in [0, 5, 6, 7, 1 << 62, 1 << 63, u64::MAX] {
        marks.between(position, 65);
    }
}
