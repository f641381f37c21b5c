//! Kprobes of the guest where our jumps would be.

use hvprobe_arch::Regs;
use hvprobe_fixtures::STACK;
use hvprobe_fixtures::kernel::{KPROBE_MUTEX, KPROBE_TABLE};
use hvprobe_hit::Outcome;

use super::*;
use crate::testing::regs;
use crate::unoptimized::Unoptimized;

/// `push rbp; mov rbp, rsp; nop`: instructions begin in bytes 1 to 4 of a jump there.
const SHORT: &str = "p filler_002";
/// Address of the tests' `struct kprobe`s: links at +0, the address at +40.
const KPROBES: Gva = Gva(KPROBE_MUTEX + 0x20);
const ADDRESS: u64 = 40;
const FLAGS: u64 = 32;
const SIZE: usize = 48;

/// Registers kprobes of the guest at these addresses, in one chain of its table.
fn has(rig: &Rig, addresses: &[Gva]) {
    rig.guest.write(KPROBES, &[0; 2 * SIZE]);
    let kprobe = |n: usize| KPROBES.wrapping_add((SIZE * n) as u64);
    let mut link = Gva(KPROBE_TABLE + 8 * 63);
    for (n, at) in addresses.iter().enumerate() {
        rig.guest.write(link, &kprobe(n).0.to_le_bytes());
        link = kprobe(n);
        rig.guest
            .write(link.wrapping_add(ADDRESS), &at.0.to_le_bytes());
        // Not armed, like new kprobes of tracefs.
        rig.guest.write(link.wrapping_add(FLAGS), &[2]);
    }
    if addresses.is_empty() {
        rig.guest.write(link, &[0; 8]);
    }
}

/// Marks the mutex of the table as held or free.
fn locked(rig: &Rig, is: bool) {
    rig.guest
        .write(Gva(KPROBE_MUTEX), &u64::from(is).to_le_bytes());
}

fn why(rig: &Rig, id: ProbeId) -> Option<Unoptimized> {
    let info = rig.info(id);
    let optimized = info.mechanism == Some(Mechanism::Optimized);
    assert_eq!(optimized, info.unoptimized.is_none());
    info.unoptimized
}

fn retry(rig: &mut Rig) {
    // A look is due with the first call and with the third.
    for _ in 0..3 {
        rig.registry.retry_jumps(&*rig.guest);
    }
}

/// Lets the guest enter the function that copies the instruction under its `kprobe`. Returns the virtual CPU after
/// it has continued.
fn prepares(rig: &mut Rig, kprobe: Gva) -> Cpu {
    locked(rig, true);
    let mut cpu = Cpu::new(rig);
    cpu.regs = Regs {
        rdi: kprobe.0,
        rsp: STACK.0,
        ..regs()
    };
    let here = rig.at("arch_prepare_kprobe", 0);
    let decision = run_hooks(rig, cpu.hit(here));
    let resumed = cpu.resume(&decision);
    assert!(matches!(resumed, Outcome::Resume { .. }));
    cpu
}

/// As [`prepares`], with a kprobe at `at`.
fn prepares_at(rig: &mut Rig, at: Gva) -> Cpu {
    rig.guest
        .write(KPROBES.wrapping_add(ADDRESS), &at.0.to_le_bytes());
    prepares(rig, KPROBES)
}

#[test]
fn the_guest_registers_no_kprobe_while_a_jump_may_be_there() {
    let mut rig = Rig::optimizing();
    let id = rig.one(SHORT);
    let (at, caller) = (rig.addr(id), rig.at("filler_100", 3));
    let before = rig.guest.read::<5>(at);
    let is_refused = |cpu: &Cpu| {
        let regs = &cpu.regs;
        let refused =
            (regs.rip, regs.rsp, regs.rax) == (caller.0, STACK.0 + 8, (-16_i64).cast_unsigned());
        assert!(refused || regs.rsp == STACK.0, "{regs:x?}");
        refused
    };
    rig.guest.write(STACK, &caller.0.to_le_bytes());
    // The virtual CPUs do not stop.
    rig.guest.refuse_stops(true);
    assert!(is_refused(&prepares_at(&mut rig, at)));
    // Elsewhere no jump has to be removed.
    let elsewhere = rig.at("filler_004", 0);
    assert!(!is_refused(&prepares_at(&mut rig, elsewhere)));
    rig.guest.refuse_stops(false);
    // The kprobe's address cannot be read.
    let unmapped = Gva(0xdead_0000_0000_0000);
    assert!(is_refused(&prepares(&mut rig, unmapped)));
    assert_eq!((why(&rig, id), rig.guest.read::<5>(at)), (None, before));
    // The next registration succeeds.
    assert!(!is_refused(&prepares_at(&mut rig, at)));
    assert_eq!(why(&rig, id), Some(Unoptimized::Kprobe { at }));
}

#[test]
fn there_is_no_jump_near_a_kprobe_of_the_guests_until_it_has_gone() {
    let start = Rig::optimizing().at("filler_002", 0);
    // Distance of the guest's kprobe from the start of our jump, and whether it is too far away to matter. A kprobe
    // before our jump matters as far as the guest's own jump could reach.
    for (distance, far) in [
        (-20_i64, true),
        (-19, false),
        (-5, false),
        (4, false),
        (5, true),
    ] {
        let mut rig = Rig::optimizing();
        let at = Gva(start.0.wrapping_add_signed(distance));
        has(&rig, &[rig.at("vfs_read", 9), at]);
        let id = rig.one(SHORT);
        let expected = (!far).then_some(Unoptimized::Kprobe { at });
        assert_eq!(why(&rig, id), expected, "{distance}");
        assert_eq!(rig.byte(start) == INT3, !far);
        has(&rig, &[]);
        retry(&mut rig);
        assert_eq!(why(&rig, id), None);
        rig.unregister(&[id]).unwrap();
        assert_eq!(rig.byte(start), 0x55);
    }
}

#[test]
fn nothing_is_planted_on_a_kprobe_of_the_guests() {
    let mut rig = Rig::optimizing();
    let at = rig.at("filler_002", 0);
    has(&rig, &[at]);
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec(SHORT)]));
    assert_eq!(refusal(result), (0, Refused::Kprobe { at }));
    has(&rig, &[]);
    rig.one(SHORT);
}

#[test]
fn no_int3_comes_where_a_kprobe_of_the_guests_may_become_a_jump() {
    let mut rig = Rig::optimizing();
    let at = rig.at("filler_002", 0);
    for before in 1..5 {
        let kprobe = Gva(at.0 - before);
        has(&rig, &[kprobe]);
        let result = rig.changes_nothing(|rig| rig.try_register(&[spec(SHORT)]));
        assert_eq!(refusal(result), (0, Refused::UnderKprobe { at, kprobe }));
        // A probe there is not armed again either.
        has(&rig, &[]);
        let id = rig.one(SHORT);
        rig.registry.set_enabled(&[id], false, &*rig.guest).unwrap();
        has(&rig, &[kprobe]);
        rig.changes_nothing_in_memory(|rig| {
            let error = rig
                .registry
                .set_enabled(&[id], true, &*rig.guest)
                .unwrap_err();
            assert!(format!("{error:?}").contains("UnderKprobe"), "{error:?}");
        });
        // A probe that was there first prevents the guest's jump.
        has(&rig, &[]);
        rig.registry.set_enabled(&[id], true, &*rig.guest).unwrap();
        has(&rig, &[kprobe]);
        let second = rig.one("p:second filler_002");
        rig.unregister(&[id, second]).unwrap();
        assert_eq!(rig.byte(at), 0x55);
    }
}

#[test]
fn one_that_the_guests_jump_may_cover_keeps_no_other_from_being_armed() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&specs([SHORT, "p filler_004"]));
    let (at, other) = (rig.addr(ids[0]), rig.addr(ids[1]));
    rig.registry.set_armed(false, &*rig.guest).unwrap();
    has(&rig, &[Gva(at.0 - 2)]);
    rig.registry.set_armed(true, &*rig.guest).unwrap();
    assert_eq!(
        (rig.byte(at), rig.info(ids[0]).state),
        (0x55, ProbeState::Gone)
    );
    assert_ne!(rig.byte(other), 0x55);
    rig.unregister(&ids).unwrap();
}

#[test]
fn while_the_guest_changes_its_kprobes_jumps_stay_and_none_comes() {
    let mut rig = Rig::optimizing();
    let there = rig.one("p filler_004");
    locked(&rig, true);
    let id = rig.one(SHORT);
    assert_eq!(why(&rig, id), Some(Unoptimized::KprobesChange));
    assert_eq!(why(&rig, there), None);
    // The existing jump gets another detour.
    let second = rig.one("p:second filler_004");
    assert_eq!((why(&rig, there), why(&rig, second)), (None, None));
    retry(&mut rig);
    assert_eq!(why(&rig, id), Some(Unoptimized::KprobesChange));
    locked(&rig, false);
    for _ in 0..8 {
        rig.registry.retry_jumps(&*rig.guest);
    }
    assert_eq!(why(&rig, id), None);
}

#[test]
fn the_guest_registers_its_kprobe_where_no_jump_is_any_more() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&specs([SHORT, "p filler_004"]));
    let at = rig.addr(ids[0]);
    for inside in [0, 3] {
        let kprobe = at.wrapping_add(inside);
        prepares_at(&mut rig, kprobe);
        assert_eq!(why(&rig, ids[0]), Some(Unoptimized::Kprobe { at: kprobe }));
        assert_eq!(rig.guest.read::<5>(at), [INT3, 0x48, 0x89, 0xe5, 0x90]);
        assert_eq!(why(&rig, ids[1]), None);
        // The mutex is held until the kprobe is in the table, where it is found from then on.
        retry(&mut rig);
        assert_eq!(why(&rig, ids[0]), Some(Unoptimized::KprobesChange));
        has(&rig, &[kprobe]);
        locked(&rig, false);
        for _ in 0..8 {
            rig.registry.retry_jumps(&*rig.guest);
        }
        assert_eq!(why(&rig, ids[0]), Some(Unoptimized::Kprobe { at: kprobe }));
        has(&rig, &[]);
        for _ in 0..64 {
            rig.registry.retry_jumps(&*rig.guest);
        }
        assert_eq!(why(&rig, ids[0]), None);
    }
}

#[test]
fn the_guest_is_watched_while_jumps_may_be_written() {
    let mut rig = Rig::optimizing();
    let here = rig.at("arch_prepare_kprobe", 0);
    let before = rig.byte(here);
    let id = rig.one(SHORT);
    assert_eq!(rig.byte(here), INT3);
    rig.registry.set_optimization(false, &*rig.guest).unwrap();
    assert_eq!(rig.byte(here), before);
    rig.registry.set_optimization(true, &*rig.guest).unwrap();
    assert_eq!((rig.byte(here), why(&rig, id)), (INT3, None));
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.byte(here), before);
}

#[test]
fn a_table_that_cannot_be_read_to_its_end_keeps_all_jumps_away() {
    let links = [KPROBES.0, 0xdead_0000_0000_0000, u64::MAX];
    for link in links {
        let mut rig = Rig::optimizing();
        rig.guest.write(Gva(KPROBE_TABLE), &link.to_le_bytes());
        // A circular chain.
        rig.guest.write(KPROBES, &KPROBES.0.to_le_bytes());
        let id = rig.one(SHORT);
        assert_eq!(why(&rig, id), Some(Unoptimized::KprobesChange), "{link:#x}");
    }
}

#[test]
fn a_jump_that_was_asked_for_is_refused_where_the_guest_has_a_kprobe() {
    let forced = |definition| ProbeSpec {
        mechanism: Some(Mechanism::Optimized),
        ..spec(definition)
    };
    let mut rig = Rig::optimizing();
    let kprobe = rig.at("filler_002", 1);
    has(&rig, &[kprobe]);
    let specs = [spec("p filler_004"), forced(SHORT)];
    let before = rig.list();
    let (index, why) = refusal(rig.try_register(&specs));
    let at = rig.at("filler_002", 0);
    let source = Unoptimized::Kprobe { at: kprobe };
    assert_eq!((index, why), (1, Refused::Unoptimized { at, source }));
    assert_eq!(rig.list(), before);
    assert_eq!(
        (rig.byte(at), rig.byte(rig.at("filler_004", 0))),
        (0x55, 0x55)
    );
    // If refused probes are skipped, the rest of the batch is planted.
    let batch = rig
        .registry
        .register_batch(&specs, crate::registered::Refusals::Skip, &*rig.guest)
        .unwrap();
    assert_eq!((batch.probes.len(), batch.skipped.len()), (1, 1));
    assert_eq!(rig.byte(at), 0x55);
}

#[test]
fn a_branch_that_the_guests_own_patch_may_hide_keeps_a_jump_away() {
    let mut rig = Rig::optimizing();
    let at = rig.at("filler_002", 8);
    let own = rig.guest.read::<5>(at);
    // A kprobe, or a poke in progress; an optimized kprobe; and no patch.
    for (bytes, hidden) in [
        ([INT3, own[1], own[2], own[3], own[4]], true),
        ([0xe9, 0, 1, 0, 0], true),
        (own, false),
    ] {
        rig.guest.write(at, &bytes);
        let id = rig.one(SHORT);
        let expected = hidden.then_some(Unoptimized::Hidden { at });
        assert_eq!(why(&rig, id), expected, "{bytes:x?}");
        rig.unregister(&[id]).unwrap();
    }
}

#[test]
fn an_int3_is_left_to_the_guest_only_where_its_kprobe_is_armed_by_one() {
    // Flags of kprobes armed with an int3; gone, disabled, or handled by ftrace.
    for (flags, is_the_guests) in [(0, true), (4, true), (1, false), (2, false), (8, false)] {
        let mut rig = Rig::optimizing();
        rig.registry.set_optimization(false, &*rig.guest).unwrap();
        let id = rig.one(SHORT);
        let at = rig.addr(id);
        has(&rig, &[at]);
        rig.guest.write(KPROBES.wrapping_add(FLAGS), &[flags]);
        rig.one("p filler_100");
        let expected = match is_the_guests {
            true => (ProbeState::Gone, INT3),
            false => (ProbeState::Placed, 0x55),
        };
        assert_eq!(rig.state(id), expected.0, "{flags}");
        rig.unregister(&[id]).unwrap();
        assert_eq!(rig.byte(at), expected.1, "{flags}");
    }
}
