use super::super::testing::{AT, SLOT, bytes, displaced};
use super::super::{Action, classify, decode, text};
use super::*;
use crate::testing::at_least;
use iced_x86::OpKind;
use proptest::prelude::*;

/// Returns the offset and the text of each instruction of the slot up to its end.
fn listing(code: &SlotCode) -> Vec<(u64, String)> {
    let mut lines = Vec::new();
    let mut offset = 0;
    loop {
        let rest = &code.bytes()[offset..];
        if rest.iter().all(|&byte| byte == INT3) {
            // The tests of `trap_end` check how many of these int3s have a meaning.
            return lines;
        }
        let at = code.at().wrapping_add(offset as u64);
        let (instruction, _) = decode(rest, at).unwrap();
        lines.push((offset as u64, text(rest, at)));
        offset += instruction.len();
    }
}

#[test]
fn a_boosted_slot_is_the_copy_and_a_jump_back() {
    for (hex, expected) in [
        ("488b4708", "mov rax, [rdi+8]"),
        ("65488b042500ad0100", "mov rax, gs:[0x1ad00]"),
        ("f0480fb10f", "lock cmpxchg [rdi], rcx"),
        ("f348a5", "rep movsq [rdi], [rsi]"),
        ("0f30", "wrmsr"),
        ("55", "push rbp"),
    ] {
        let original = displaced(hex);
        let slot = original.boosted(SLOT).unwrap();
        let len = original.bytes().len() as u64;
        let back = format!("jmp {:#x}", original.next());
        assert_eq!(slot.instruction(), bytes(hex), "{hex}");
        assert_eq!(
            listing(&slot),
            [(0, expected.to_owned()), (len, back)],
            "{hex}"
        );
        assert_eq!(slot.kind(), SlotKind::Boosted);
        assert_eq!((slot.at(), slot.next()), (SLOT, SLOT.wrapping_add(len)));
    }
}

#[test]
fn a_trapped_slot_is_the_copy_and_int3() {
    let original = displaced("488b4708");
    let slot = original.trapped(SLOT).unwrap();
    assert_eq!(slot.instruction(), bytes("488b4708"));
    assert!(slot.bytes()[4..].iter().all(|&byte| byte == INT3));
    assert_eq!(slot.kind(), SlotKind::Trapped);
    assert_eq!(original.trap_end(&slot, slot.next()), Some(original.next()));
}

#[test]
fn rip_relative_operands_keep_their_target_and_their_length() {
    for hex in [
        "488b05f0ffffff",       // mov rax, [rip-0x10]
        "c70500010000efbeadde", // mov dword [rip+0x100], 0xdeadbeef
        "65488b0500200000",     // mov rax, gs:[rip+0x2000]
        "f0ff0510000000",       // lock inc dword [rip+0x10]
        "c5fd6f0500040000",     // vmovdqa ymm0, [rip+0x400]
        "ff3500010000",         // push [rip+0x100]
        "488d3d00000010",       // lea rdi, [rip+0x10000000]
    ] {
        let original = displaced(hex);
        for slot in [original.boosted(SLOT), original.trapped(SLOT)] {
            let slot = slot.unwrap();
            assert_eq!(slot.instruction().len(), original.bytes().len());
            assert_eq!(
                text(slot.instruction(), SLOT),
                text(original.bytes(), AT),
                "{hex}"
            );
        }
    }
}

#[test]
fn conditional_jumps_keep_their_condition_and_both_ways_on() {
    for condition in 0..16_u8 {
        let short = [0x70 | condition, 0x10];
        let near = [0x0f, 0x80 | condition, 0x10, 0, 0, 0];
        for code in [&short[..], &near[..]] {
            let original = classify(code, AT).unwrap();
            let (next, target) = (original.next(), original.next().wrapping_add(0x10));
            let boosted = original.boosted(SLOT).unwrap();
            let back = format!("jmp {next:#x}");
            assert_eq!(listing(&boosted), [(0, text(code, AT)), (6, back)]);

            let trapped = original.trapped(SLOT).unwrap();
            assert_eq!(trapped.bytes()[..2], [0x70 | condition, 1]);
            assert_eq!(trapped.bytes()[2..], [INT3; SLOT_SIZE - 2]);
            let end = |offset| original.trap_end(&trapped, SLOT.wrapping_add(offset));
            assert_eq!([end(2), end(3)], [Some(next), Some(target)]);
            assert_eq!([end(0), end(1), end(4)], [None; 3]);
        }
    }
    // With a branch hint.
    let hinted = displaced("2e7410").boosted(SLOT).unwrap();
    assert_eq!(hinted.instruction()[..2], [0x0f, 0x84]);
}

#[test]
fn only_the_int3_of_a_trapped_slot_ends_it() {
    for hex in ["488b4708", "7410", "55"] {
        let original = displaced(hex);
        let boosted = original.boosted(SLOT).unwrap();
        let trapped = original.trapped(SLOT).unwrap();
        for offset in 0..SLOT_SIZE as u64 {
            let at = SLOT.wrapping_add(offset);
            assert_eq!(original.trap_end(&boosted, at), None, "{hex} at {offset}");
        }
        assert_eq!(original.trap_end(&trapped, SLOT), None);
        assert_eq!(original.trap_end(&trapped, original.next()), None);
    }
}

#[test]
fn addresses_in_a_slot_stand_for_those_around_the_original() {
    let original = displaced("488b4708");
    for slot in [original.boosted(SLOT), original.trapped(SLOT)] {
        let slot = slot.unwrap();
        let in_place = |offset| original.in_place(&slot, SLOT.wrapping_add(offset));
        assert_eq!(in_place(0), Some(AT));
        assert_eq!(in_place(4), Some(AT.wrapping_add(4)));
        for inside in [1, 2, 3, 5, 9, 31, 32, u64::MAX] {
            assert_eq!(in_place(inside), None, "{inside}");
        }
    }
    let branch = displaced("7410");
    let trapped = branch.trapped(SLOT).unwrap();
    let in_place = |offset| branch.in_place(&trapped, SLOT.wrapping_add(offset));
    let (next, target) = (AT.wrapping_add(2), AT.wrapping_add(0x12));
    assert_eq!(
        [0, 1, 2, 3, 4].map(in_place),
        [Some(AT), None, Some(next), Some(target), None]
    );
}

#[test]
fn what_is_beyond_two_gibibytes_is_out_of_reach() {
    let far = Gva(0xffff_8880_0000_0000);
    for hex in ["488b05f0ffffff", "7410", "488b4708"] {
        let original = displaced(hex);
        let error = original.boosted(far).unwrap_err();
        assert!(matches!(error, RelocateError::OutOfReach { slot, .. } if slot == far));
    }
    // A trapped copy that refers to no address can be anywhere.
    assert!(displaced("488b4708").trapped(far).is_ok());
    assert!(displaced("7410").trapped(far).is_ok());
    assert!(displaced("488b05f0ffffff").trapped(far).is_err());
}

#[test]
fn the_furthest_slots_reach() {
    // The last slot that reaches, and the first that does not, on either side: for an operand,
    // then for the jump back.
    let operand = displaced("488b05f0ffffff");
    let target = AT.wrapping_add(7).wrapping_sub(0x10);
    let trapped = |slot| operand.trapped(slot).is_ok();
    let plain = displaced("488b4708");
    let boosted = |slot| plain.boosted(slot).is_ok();
    for (target, len, reaches) in [
        (target, 7, &trapped as &dyn Fn(Gva) -> bool),
        (plain.next(), 4 + 5, &boosted),
    ] {
        let nearest = target.wrapping_sub(len + (1 << 31) - 1);
        let furthest = target.wrapping_add((1 << 31) - len);
        assert!(reaches(nearest) && !reaches(nearest.wrapping_sub(1)));
        assert!(reaches(furthest) && !reaches(furthest.wrapping_add(1)));
    }
}

#[test]
fn what_would_show_its_address_or_not_come_back_takes_no_slot() {
    for hex in [
        "e800000000",
        "eb10",
        "ffd0",
        "ffe0",
        "ff1424",
        "c3",
        "9c",
        "9d",
        "fa",
        "fb",
        "e210",
        "e310",
    ] {
        let error = RelocateError::Emulated { at: AT };
        assert_eq!(displaced(hex).boosted(SLOT), Err(error), "{hex}");
        assert_eq!(displaced(hex).trapped(SLOT), Err(error), "{hex}");
    }
}

/// Checks that the copy is the same instruction as the original, with the same operands.
fn check_same(original: &Displaced, copy: &SlotCode) -> Result<(), TestCaseError> {
    let (a, _) = decode(original.bytes(), AT).unwrap();
    let (b, _) = decode(copy.instruction(), copy.at()).unwrap();
    prop_assert_eq!(a.mnemonic(), b.mnemonic());
    prop_assert_eq!(b.len(), copy.instruction().len());
    prop_assert_eq!(a.op_count(), b.op_count());
    for op in 0..a.op_count() {
        prop_assert_eq!(a.op_kind(op), b.op_kind(op));
        prop_assert_eq!(a.op_register(op), b.op_register(op));
        if a.op_kind(op) == OpKind::NearBranch64 && copy.kind() == SlotKind::Boosted {
            prop_assert_eq!(a.near_branch_target(), b.near_branch_target());
        }
        if matches!(a.op_kind(op), OpKind::Immediate8 | OpKind::Immediate32) {
            prop_assert_eq!(a.immediate(op), b.immediate(op));
        }
    }
    prop_assert_eq!(a.has_rep_prefix(), b.has_rep_prefix());
    prop_assert_eq!(a.has_repne_prefix(), b.has_repne_prefix());
    prop_assert_eq!(a.has_lock_prefix(), b.has_lock_prefix());
    if a.op_kinds().any(|kind| kind == OpKind::Memory) {
        prop_assert_eq!(a.memory_segment(), b.memory_segment());
        prop_assert_eq!(a.memory_base(), b.memory_base());
        prop_assert_eq!(a.memory_index(), b.memory_index());
        prop_assert_eq!(a.memory_displacement64(), b.memory_displacement64());
    }
    Ok(())
}

proptest! {
    #![proptest_config(at_least(20_000))]

    #[test]
    fn copies_fit_their_slot_mean_the_same_and_lead_back(
        code in prop::collection::vec(any::<u8>(), 15),
        opcode in prop_oneof![
            Just(vec![]), Just(vec![0x0f]), Just(vec![0x48]), Just(vec![0x66]), Just(vec![0xf3]),
            Just(vec![0x48, 0x8b, 0x05]), (0x70..0x80_u8).prop_map(|jcc| vec![jcc]),
        ],
        distance in -0x4000_0000_i64..0x4000_0000,
    ) {
        let code = [opcode, code].concat();
        let slot = Gva(AT.0.wrapping_add_signed(distance));
        let Ok(original) = classify(&code, AT) else { return Ok(()) };
        let copies = [original.boosted(slot), original.trapped(slot)];
        if original.action() == Action::Boost {
            let no_copy = RelocateError::Emulated { at: AT };
            prop_assert!(copies.iter().all(|copy| *copy != Err(no_copy)));
        }
        for copy in copies.into_iter().flatten() {
            check_same(&original, &copy)?;
            // Only the starts of the slot's instructions are translated: the start of the copy to that of the
            // original, and the start of what follows the copy to that of the next instruction.
            let lines = listing(&copy);
            let mut starts: Vec<u64> = lines.iter().map(|(offset, _)| *offset).collect();
            prop_assert_eq!(starts[0], 0);
            let next = format!("jmp {:#x}", original.next());
            match copy.kind() {
                SlotKind::Boosted => {
                    prop_assert_eq!(lines.len(), 2);
                    prop_assert_eq!(&lines[1].1, &next);
                }
                SlotKind::Trapped => {
                    prop_assert_eq!(lines.len(), 1);
                    starts.push(copy.instruction().len() as u64);
                    if text(copy.instruction(), slot).starts_with('j') {
                        starts.push(copy.instruction().len() as u64 + 1);
                    }
                }
            }
            for offset in 0..SLOT_SIZE as u64 {
                let rip = slot.wrapping_add(offset);
                let place = original.in_place(&copy, rip);
                prop_assert_eq!(place.is_some(), starts.contains(&offset));
                let end = original.trap_end(&copy, rip);
                if copy.kind() == SlotKind::Trapped && offset > 0 {
                    prop_assert_eq!(end, place);
                } else {
                    prop_assert_eq!(end, None);
                }
            }
        }
    }
}
