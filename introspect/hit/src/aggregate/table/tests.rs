use std::collections::BTreeMap;
use std::num::NonZeroU64;

use hvprobe_arch::Regs;
use hvprobe_arch::regs::Gpr;
use hvprobe_linux::task::Task;
use hvprobe_spec::histogram::read_histogram;
use hvprobe_spec::predicate::{Check, Predicate, With};
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{Common, RegisterSet, Source, fetch::Operator};
use proptest::prelude::*;

use super::*;
use crate::aggregate::KeyValue;
use crate::event::{Call, Captured};

const PROBE: ProbeId = ProbeId(3);

fn event(rdi: u64, rsi: u64, comm: &[u8]) -> Event {
    let mut regs = Regs::default();
    regs.set(Gpr::Rdi, rdi);
    regs.set(Gpr::Rsi, rsi);
    let mut padded = [0; 16];
    padded[..comm.len()].copy_from_slice(comm);
    Event {
        kind: EventKind::Hit,
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        seq: 0,
        probe: PROBE,
        vcpu: 1,
        host_ns: 5_000,
        guest_tsc: 0,
        regs,
        task: (!comm.is_empty()).then_some(Task {
            pid: 7,
            tgid: 7,
            comm: padded,
        }),
        cost_ns: 0,
    }
}

fn register(register: Gpr, size: u8, signed: bool) -> Measured {
    Measured::Field(Field::Number {
        source: Source::Registers {
            registers: vec![register],
            entry: false,
        },
        size,
        bits: None,
        signed,
    })
}

fn comm() -> Measured {
    Measured::Field(Field::Text(Source::Common(Common::Comm)))
}

/// Returns a table for the histogram `text`, with these keys and values.
fn table(text: &str, keys: Vec<Measured>, values: Vec<Measured>) -> Table {
    let histogram = read_histogram(text).expect("a histogram");
    let forms = histogram.keys.iter().map(|key| key.form);
    let keys = keys.into_iter().zip(forms).map(|(of, form)| Part {
        of,
        form,
        shape: Shape {
            name: String::new(),
            size: 8,
            kind: ShapeKind::Unsigned,
        },
    });
    let what = Aggregate {
        keys: keys.collect(),
        values,
        filter: None,
    };
    let mut table = Table::new(histogram, Arc::new(MemoryBudget::new(usize::MAX)));
    table.count(PROBE, Arc::default(), what).unwrap();
    table
}

/// Returns the numeric keys, and the number of hits of each.
fn numbers(table: &Table) -> Vec<(u64, u64)> {
    let rows = table.copy().snapshot().rows;
    let number = |row: &Row| match row.keys.as_slice() {
        [KeyValue::Number(number), ..] => (*number, row.hits),
        keys => panic!("{keys:?}"),
    };
    rows.iter().map(number).collect()
}

#[test]
fn powers_of_two_are_those_of_the_kernel() {
    let mut table = table(
        "keys=a.log2:sort=a",
        vec![register(Gpr::Rdi, 8, false)],
        vec![],
    );
    for (value, power) in [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 3),
        (1 << 63, 63),
        ((1 << 63) + 1, 64),
        (u64::MAX, 64),
    ] {
        table.clear();
        table.hear(&[event(value, 0, b"")], 0);
        assert_eq!(numbers(&table), [(power, 1)], "{value}");
    }
}

#[test]
fn ranges_of_bits_begin_at_powers_of_two() {
    let of = |signed| {
        let keys = vec![register(Gpr::Rdi, 8, signed)];
        let mut table = table("keys=a.bits:sort=a", keys, vec![]);
        let values = [0, 1, 2, 3, 4, 1 << 62, (1 << 63) - 1, 1 << 63, u64::MAX];
        table.hear(&values.map(|value| event(value, 0, b"")), 0);
        numbers(&table)
    };
    let common = [(0, 1), (1, 1), (2, 2), (3, 1), (63, 2)];
    assert_eq!(of(false), [&common[..], &[(64, 2)]].concat());
    assert_eq!(of(true), [&[(u64::MAX, 2)], &common[..]].concat());
}

#[test]
fn buckets_begin_at_multiples_of_their_width() {
    let mut table = table(
        "keys=a.buckets=100:sort=a",
        vec![register(Gpr::Rdi, 8, false)],
        vec![],
    );
    for value in [0, 99, 100, 199, u64::MAX] {
        table.hear(&[event(value, 0, b"")], 0);
    }
    let last = u64::MAX - u64::MAX % 100;
    assert_eq!(numbers(&table), [(0, 2), (100, 2), (last, 1)]);
}

#[test]
fn buckets_of_signed_numbers_are_as_wide_below_zero() {
    let keys = vec![register(Gpr::Rdi, 8, true)];
    let mut table = table("keys=a.buckets=100:sort=a", keys, vec![]);
    for value in [0, 99, -1, -100, -101, i64::MIN, i64::MIN + 7, i64::MAX] {
        table.hear(&[event(value.cast_unsigned(), 0, b"")], 0);
    }
    let rows: Vec<_> = numbers(&table)
        .into_iter()
        .map(|(begins, hits)| (begins.cast_signed(), hits))
        .collect();
    let last = i64::MAX - i64::MAX % 100;
    let expected = [(i64::MIN, 2), (-200, 1), (-100, 2), (0, 2), (last, 1)];
    assert_eq!(rows, expected);
}

#[test]
fn what_there_is_no_room_for_is_dropped_and_what_was_lost_is_counted() {
    let mut table = table("keys=a:size=2", vec![register(Gpr::Rdi, 8, false)], vec![]);
    let events: Vec<_> = [1, 2, 3, 1, 3].map(|key| event(key, 0, b"")).into();
    table.hear(&events, 4);
    let snapshot = table.copy().snapshot();
    assert_eq!((snapshot.hits, snapshot.dropped, snapshot.lost), (3, 2, 4));
    assert_eq!(snapshot.rows.len(), 2);
    table.clear();
    let cleared = table.copy().snapshot();
    assert_eq!(cleared, Snapshot::default());
    table.pause(true);
    table.hear(&events, 4);
    assert_eq!(table.copy().snapshot(), Snapshot::default());
    table.pause(false);
    table.hear(&events[..1], 0);
    assert_eq!(numbers(&table), [(1, 1)]);
}

#[test]
fn keys_of_long_texts_are_bounded_together() {
    let mut table = table("keys=c:size=131072", vec![comm()], vec![]);
    // As if this many bytes of keys were stored.
    table.bytes = KEY_BYTES - 4;
    table.hear(
        &[event(0, 0, b"a"), event(0, 0, b"bb"), event(0, 0, b"a")],
        0,
    );
    let snapshot = table.copy().snapshot();
    assert_eq!((snapshot.hits, snapshot.dropped), (2, 1));
}

#[test]
fn what_cannot_be_read_is_a_key_of_its_own_and_adds_nothing() {
    let values = vec![Measured::Duration, register(Gpr::Rsi, 4, true)];
    let mut table = table("keys=c:vals=d,x.min", vec![comm()], values);
    let mut returned = event(0, 0xffff_fffe, b"cat");
    returned.kind = EventKind::Return(Call {
        id: 0,
        entry_ns: 4_000,
        entry_tsc: 0,
        entry: Regs::default(),
    });
    let mut untimed = returned;
    untimed.host_ns = 0;
    let mut fault = event(0, 0, b"cat");
    fault.kind = EventKind::Fault {
        vector: 14,
        error_code: None,
    };
    let mut foreign = returned;
    foreign.probe = ProbeId(4);
    table.hear(&[returned, untimed, fault, foreign, event(0, 5, b"")], 0);
    let snapshot = table.copy().snapshot();
    let rows: Vec<_> = snapshot
        .rows
        .iter()
        .map(|row| {
            let durations = (row.sums[0].count, row.sums[0].sum);
            (row.keys.clone(), row.hits, durations, row.sums[1].least)
        })
        .collect();
    let cat = vec![KeyValue::Text(b"cat".as_slice().into())];
    assert_eq!(
        rows,
        [
            (vec![KeyValue::Unreadable], 1, (0, 0), 5),
            (cat, 2, (1, 1_000), -2),
        ]
    );
}

#[test]
fn a_filter_says_which_hits_count() {
    let mut table = table("keys=a", vec![register(Gpr::Rdi, 8, false)], vec![]);
    let Measured::Field(field) = register(Gpr::Rdi, 8, false) else {
        unreachable!("it is a field");
    };
    let with = With::Number(Operator::Greater, 1);
    let counted = table.probes.get_mut(&PROBE).expect("it is counted");
    counted.what.filter = Some(Predicate::Check(Check { field, with }));
    table.hear(&[event(1, 0, b""), event(2, 0, b"")], 0);
    assert_eq!(numbers(&table), [(2, 1)]);
}

#[test]
fn entries_are_in_the_order_that_is_asked_for() {
    for (sort, expected) in [
        ("", [2, 1, 3]),
        (":sort=hitcount.descending", [3, 1, 2]),
        (":sort=a.descending", [3, 2, 1]),
        (":sort=v", [3, 1, 2]),
        (":sort=b,a.descending", [3, 1, 2]),
        (":sort=a,b", [1, 2, 3]),
    ] {
        let text = format!("keys=a,b:vals=v{sort}");
        let keys = vec![register(Gpr::Rdi, 8, false), register(Gpr::Rsi, 8, true)];
        let mut table = table(&text, keys, vec![register(Gpr::Rsi, 8, true)]);
        let minus = 1_u64.wrapping_neg();
        let hits = [
            (1, minus),
            (1, minus),
            (2, 5),
            (3, minus),
            (3, minus),
            (3, minus),
        ];
        let events: Vec<_> = hits.iter().map(|(a, b)| event(*a, *b, b"")).collect();
        table.hear(&events, 0);
        let order: Vec<_> = numbers(&table).iter().map(|(a, _)| *a).collect();
        assert_eq!(order, expected, "{sort}");
    }
}

proptest! {
    /// Compares the table with counts that are made here.
    #[test]
    fn every_hit_is_in_one_entry(hits in proptest::collection::vec((0..6_u64, any::<i32>(), "[ab]{0,2}"), 0..200)) {
        let keys = vec![register(Gpr::Rdi, 8, false), comm()];
        let mut table = table("keys=a,c:vals=v", keys, vec![register(Gpr::Rsi, 4, true)]);
        let mut expected: BTreeMap<(u64, String), (u64, i128)> = BTreeMap::new();
        for (a, v, comm) in &hits {
            let extended = i64::from(*v).cast_unsigned();
            table.hear(&[event(*a, extended, comm.as_bytes())], 0);
            let entry = expected.entry((*a, comm.clone())).or_default();
            *entry = (entry.0 + 1, entry.1 + i128::from(*v));
        }
        let snapshot = table.copy().snapshot();
        prop_assert_eq!(snapshot.hits, hits.len() as u64);
        prop_assert_eq!(snapshot.rows.len(), expected.len());
        for row in snapshot.rows {
            let [KeyValue::Number(a), comm] = row.keys.as_slice() else {
                panic!("{row:?}");
            };
            let comm = match comm {
                KeyValue::Text(text) => String::from_utf8_lossy(text).into_owned(),
                _ => String::new(),
            };
            prop_assert_eq!(expected.get(&(*a, comm)), Some(&(row.hits, row.sums[0].sum)));
        }
    }
}

#[test]
fn numbers_are_divided_towards_zero() {
    let divided = |of, by| Measured::Divided {
        of: Box::new(of),
        by: NonZeroU64::new(by).unwrap(),
    };
    let keys = vec![divided(register(Gpr::Rsi, 8, true), 10)];
    let values = vec![
        divided(register(Gpr::Rsi, 8, false), 1 << 60),
        divided(register(Gpr::Rsi, 8, true), u64::MAX),
    ];
    let mut table = table(
        "keys=a/10:vals=b/1152921504606846976,c/18446744073709551615.min",
        keys,
        values,
    );
    let numbers = [-19_i64, 19, i64::MIN, 5].map(i64::cast_unsigned);
    table.hear(&numbers.map(|number| event(0, number, b"")), 0);
    let mut rows: Vec<_> = table
        .copy()
        .snapshot()
        .rows
        .into_iter()
        .map(|row| {
            let KeyValue::Number(key) = row.keys[0] else {
                panic!("{row:?}")
            };
            (key.cast_signed(), row.sums[0].sum, row.sums[1].least)
        })
        .collect();
    rows.sort_unstable();
    assert_eq!(
        rows,
        [(i64::MIN / 10, 8, 0), (-1, 15, 0), (0, 0, 0), (1, 0, 0)]
    );
}

#[test]
fn tables_of_a_machine_have_no_more_memory_than_they_may_together_and_give_it_back() {
    let budget = Arc::new(MemoryBudget::new(100_000));
    let all = budget.left();
    let new = || {
        let histogram = read_histogram("keys=a:vals=b:size=131072").expect("a histogram");
        let form = histogram.keys[0].form;
        let what = Aggregate {
            keys: vec![Part {
                of: register(Gpr::Rdi, 8, false),
                form,
                shape: Shape {
                    name: String::new(),
                    size: 8,
                    kind: ShapeKind::Unsigned,
                },
            }],
            values: vec![register(Gpr::Rsi, 8, false)],
            filter: None,
        };
        let mut table = Table::new(histogram, Arc::clone(&budget));
        table.count(PROBE, Arc::default(), what.clone()).map(|()| {
            // A probe that is counted again takes no more room.
            let left = budget.left();
            table.count(PROBE, Arc::default(), what).expect("the same");
            assert_eq!(budget.left(), left);
            table
        })
    };
    let fill = |table: &mut Table| {
        table.clear();
        let events: Vec<_> = (0..10_000).map(|value| event(value, 1, b"a")).collect();
        table.hear(&events, 0);
        let said = table.copy().snapshot();
        assert_eq!(said.hits + said.dropped, 10_000);
        said.rows.len()
    };
    let (mut one, mut other) = (new().expect("room"), new().expect("room"));
    let first = fill(&mut one);
    assert!(first > 100 && first < 1000, "{first}");
    assert_eq!(fill(&mut other), 0);
    // An entry that exists still counts.
    one.hear(&[event(0, 1, b"a")], 0);
    assert_eq!(one.copy().snapshot().hits, first as u64 + 1);
    one.clear();
    assert_eq!(fill(&mut other), first);
    drop((one, other));
    assert_eq!(budget.left(), all);
    assert!(budget.take(all));
    assert_eq!(new().err(), Some(NoRoom { left: 0 }));
}

#[test]
fn what_is_known_of_a_probe_makes_room_for_what_is_known_later() {
    const RESERVED: usize = 1000;
    let mut table = table("keys=a", vec![register(Gpr::Rdi, 8, false)], vec![]);
    let what = table.probes[&PROBE].what.clone();
    let weight = table.probes[&PROBE].weight();
    // As if other tables had taken all of the machine's budget but this.
    table.budget = Arc::new(MemoryBudget::new(weight + RESERVED));
    assert!(table.budget.take(weight));
    table.count(PROBE, Arc::default(), what.clone()).unwrap();
    table.reserve(RESERVED).unwrap();
    assert_eq!(table.budget.left(), 0);
    table.count(PROBE, Arc::default(), what.clone()).unwrap();
    let mut long = what.clone();
    let part = long.keys[0].clone();
    long.keys = vec![part; 100];
    assert!(table.count(PROBE, Arc::default(), long.clone()).is_err());
    table.learn(PROBE, Arc::default(), what, RESERVED);
    assert_eq!(table.budget.left(), RESERVED);
    table.hear(&[event(1, 0, b"")], 0);
    assert_eq!(numbers(&table), [(1, 1)]);

    // The other definition is too large: the probe's hits are dropped, and what was counted stays.
    let left = table.budget.left();
    table.reserve(left).unwrap();
    table.learn(PROBE, Arc::default(), long, left);
    table.hear(&[event(1, 0, b""), event(2, 0, b"")], 0);
    let snapshot = table.copy().snapshot();
    assert_eq!(
        (snapshot.hits, snapshot.dropped, snapshot.rows.len()),
        (1, 2, 1)
    );
    let budget = Arc::clone(&table.budget);
    assert!(budget.left() > left);
    drop(table);
    assert_eq!(budget.left(), weight + RESERVED);
}
