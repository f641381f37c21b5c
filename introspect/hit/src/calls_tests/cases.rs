//! Tests of one property each.

use hvprobe_arch::Gva;
use hvprobe_spec::ProbeId;

use super::entry_at;
use crate::atomics::WINDOW;
use crate::calls::*;

const TASK: Gva = Gva(0xffff_8880_0010_0000);

fn push_all(calls: &Calls, task: Gva, pool: &Pool, slots: &[u64]) {
    let mut open = calls.open(task).unwrap();
    for &slot in slots {
        assert!(open.push(pool, &entry_at(slot)));
    }
}

#[test]
fn an_entry_comes_back_as_it_was_written() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(7), MaxActive::Default, 256).unwrap();
    let data: Vec<u8> = (0..=255).collect();
    let mut open = calls.open(TASK).unwrap();
    for len in [0, 1, 8, 13, 256] {
        let entry = Entry {
            data: &data[..len],
            ..entry_at(0x1000)
        };
        assert!(open.push(&pool, &entry));
        let mut seen = 0;
        let to = open.returned(entry.slot, |how, call| {
            seen += 1;
            assert_eq!(how, Ended::Returned);
            assert_eq!(call.probe(), ProbeId(7));
            assert_eq!(
                (call.id(), call.slot(), call.ret()),
                (entry.id, entry.slot, entry.ret)
            );
            assert_eq!((call.host_ns(), call.guest_tsc()), (19, 20));
            assert_eq!(call.regs(), *entry.regs);
            assert_eq!(call.data(&mut [0; DATA_MAX]), entry.data);
        });
        assert_eq!((to, seen), (Some(entry.ret), 1));
    }
}

#[test]
fn data_beyond_the_pools_size_is_not_kept() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Default, 0).unwrap();
    let mut open = calls.open(TASK).unwrap();
    let entry = Entry {
        data: &[1; 300],
        ..entry_at(0x1000)
    };
    assert!(open.push(&pool, &entry));
    open.remove_all(|call| assert_eq!(call.data(&mut [0; DATA_MAX]), []));
}

#[test]
fn maxactive_is_as_with_kprobes() {
    let limit = |vcpus, maxactive| {
        let calls = Calls::new(vcpus, 0);
        calls
            .pool(ProbeId(0), maxactive, 0)
            .map(|pool| pool.limit())
    };
    assert_eq!(limit(1, MaxActive::Default), Ok(10));
    assert_eq!(limit(8, MaxActive::Default), Ok(16));
    assert_eq!(limit(u32::MAX, MaxActive::Default), Ok(FIXED_MAX));
    assert_eq!(limit(8, MaxActive::Fixed(0)), Ok(16));
    assert_eq!(limit(8, MaxActive::Fixed(1)), Ok(1));
    assert_eq!(limit(8, MaxActive::Fixed(4096)), Ok(4096));
    assert_eq!(
        limit(8, MaxActive::Fixed(4097)),
        Err(PoolError::TooManyInstances(4097))
    );
    assert_eq!(limit(8, MaxActive::Auto), Ok(AUTO_MAX));
    assert_eq!(
        Calls::new(1, 0)
            .pool(ProbeId(0), MaxActive::Auto, 257)
            .err(),
        Some(PoolError::TooMuchData(257))
    );
}

#[test]
fn an_auto_pool_grows_to_its_end_and_no_further() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Auto, 0).unwrap();
    let mut open = calls.open(TASK).unwrap();
    for i in 0..AUTO_MAX {
        assert!(open.push(&pool, &entry_at(u64::from(i))), "{i}");
    }
    assert!(!open.push(&pool, &entry_at(0)));
    assert_eq!(pool.active(), AUTO_MAX);
    let mut expected = u64::from(AUTO_MAX);
    open.remove_all(|call| {
        expected -= 1;
        assert_eq!(call.id(), expected);
    });
    assert_eq!((expected, pool.active()), (0, 0));
}

#[test]
fn the_instances_of_a_probe_that_left_serve_another() {
    let calls = Calls::new(1, 0);
    let first = calls.pool(ProbeId(0), MaxActive::Fixed(40), 0).unwrap();
    let index = first.index;
    push_all(&calls, TASK, &first, &[0x1000]);
    drop(first);
    // One call is still in flight.
    let second = calls.pool(ProbeId(1), MaxActive::Fixed(2), 0).unwrap();
    assert_ne!(second.index, index);
    let to = calls.open(TASK).unwrap().returned(Gva(0x1000), |_, call| {
        panic!("reported to nobody: {call:?}");
    });
    assert_eq!(to, Some(Gva(0x1001)));
    let other_size = calls.pool(ProbeId(2), MaxActive::Fixed(2), 8).unwrap();
    assert_ne!(other_size.index, index);
    let third = calls.pool(ProbeId(3), MaxActive::Fixed(3), 0).unwrap();
    assert_eq!(third.index, index);
    push_all(&calls, TASK, &third, &[0x1000, 0xff8, 0xff0]);
    let mut open = calls.open(TASK).unwrap();
    assert!(
        !open.push(&third, &entry_at(0xfe8)),
        "the limit is the new probe's"
    );
    open.remove_all(|call| assert_eq!(call.probe(), ProbeId(3)));
}

#[test]
fn a_task_without_a_free_cell_is_missed_until_one_falls_idle() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Auto, 0).unwrap();
    let task = |i: u64| Gva(0x1000 + i * 0x40);
    for i in 0..WINDOW as u64 {
        push_all(&calls, task(i), &pool, &[0x1000]);
    }
    let other = task(1000);
    assert!(calls.open(other).is_none());
    assert!(
        calls
            .open(task(3))
            .unwrap()
            .returned(Gva(0x1000), |_, _| ())
            .is_some()
    );
    push_all(&calls, other, &pool, &[0x2000]);
    assert!(calls.open(task(3)).is_none());
    assert_eq!(
        calls.open(other).unwrap().returned(Gva(0x2000), |_, _| ()),
        Some(Gva(0x2001))
    );
}

#[test]
fn a_task_that_is_open_cannot_be_opened_again() {
    let calls = Calls::new(1, CELLS);
    let open = calls.open(TASK).unwrap();
    assert!(calls.open(TASK).is_none());
    drop(open);
    assert!(calls.open(TASK).is_some());
    assert!(calls.open(Gva(0)).is_none());
    assert!(calls.open(Gva(u64::MAX)).is_some());
}

#[test]
fn an_entry_on_one_exception_stack_leaves_frames_on_its_neighbours_alone() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Default, 0).unwrap();
    let nmi = 0xffff_fe00_0000_2f00;
    for (slot, orphans) in [(nmi + 0x2000, 0), (nmi + 0x80, 1)] {
        push_all(&calls, TASK, &pool, &[nmi]);
        let mut seen = 0;
        let mut open = calls.open(TASK).unwrap();
        let ret = open.enter(Gva(slot), ReturnAddress::Caller(Gva(5)), |_| seen += 1);
        assert_eq!((ret, seen), (Some(Gva(5)), orphans));
        open.remove_all(|_| ());
    }
}

#[test]
fn a_slot_that_holds_the_trampoline_without_a_call_has_no_return_address() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(0), MaxActive::Default, 0).unwrap();
    push_all(&calls, TASK, &pool, &[0x1000]);
    let mut open = calls.open(TASK).unwrap();
    assert_eq!(
        open.enter(Gva(0xff8), ReturnAddress::Trampoline, |_| ()),
        None
    );
    assert_eq!(open.returned(Gva(0xff8), |_, _| ()), None);
    assert_eq!(open.returned(Gva(0x1000), |_, _| ()), Some(Gva(0x1001)));
}

#[test]
fn one_of_several_probes_of_a_frame_may_leave() {
    for leaver in 0..3 {
        let calls = Calls::new(1, 0);
        let pools: Vec<_> = (0..3)
            .map(|id| calls.pool(ProbeId(id), MaxActive::Default, 0).unwrap())
            .collect();
        push_all(&calls, TASK, &pools[0], &[0x2000]);
        for pool in &pools {
            push_all(&calls, TASK, pool, &[0x1000]);
        }
        let removed = calls.remove(
            |probe| probe == ProbeId(leaver),
            |frame| {
                assert_eq!(
                    (frame.task, frame.slot, frame.ret),
                    (TASK, Gva(0x2000), Gva(0x2001))
                );
                Fate::Keep
            },
        );
        let kept = u32::from(leaver == 0);
        assert_eq!(removed, Removed { forgotten: 1, kept });
        let mut seen = Vec::new();
        let mut open = calls.open(TASK).unwrap();
        assert_eq!(
            open.returned(Gva(0x1000), |_, call| seen.push(call.probe().0)),
            Some(Gva(0x1001))
        );
        let stay: Vec<_> = (0..3).rev().filter(|&id| id != leaver).collect();
        assert_eq!(seen, stay);
        // The outer call returns, but is not reported if its probe has left.
        seen.clear();
        assert_eq!(
            open.returned(Gva(0x2000), |_, call| seen.push(call.probe().0)),
            Some(Gva(0x2001))
        );
        assert_eq!(seen.is_empty(), leaver == 0);
    }
}

#[test]
fn return_addresses_are_known_of_calls_that_have_not_ended_also_while_they_are_open() {
    let calls = Calls::new(1, 0);
    let pool = calls.pool(ProbeId(7), MaxActive::Default, 0).unwrap();
    let ret = |slot| calls.return_address(TASK, Gva(slot));
    let (inner, outer) = (entry_at(0x1000).ret, entry_at(0x2000).ret);
    assert_eq!(ret(0x1000), None);
    push_all(&calls, TASK, &pool, &[0x2000, 0x1000]);
    assert_eq!(
        (ret(0x1000), ret(0x2000), ret(0x3000)),
        (Some(inner), Some(outer), None)
    );
    let mut open = calls.open(TASK).unwrap();
    let to = open.returned(Gva(0x1000), |_, _| {
        // The inner call has not ended yet.
        assert_eq!((ret(0x1000), ret(0x2000)), (Some(inner), Some(outer)));
    });
    assert_eq!(to, Some(inner));
    assert_eq!((ret(0x1000), ret(0x2000)), (None, Some(outer)));
    drop(open);
    let other = Gva(TASK.0 + 0x4000);
    assert_eq!(calls.return_address(other, Gva(0x2000)), None);
}
