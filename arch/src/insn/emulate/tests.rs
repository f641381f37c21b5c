//! Tests of emulated instructions: against expected results here, and against this processor in [`native`] and
//! [`native_flow`].

mod native;
mod native_flow;

use super::super::testing::{AT, Words, displaced};
use super::super::{Action, Effect, MemoryFault, classify};
use super::execute::POPPED;
use super::*;
use crate::Gva;
use crate::paging::WalkError;
use crate::regs::{Regs, rflags};
use expect_test::{Expect, expect};

const TOP: u64 = 0xffff_c900_0000_1000;
const POPPED_WORD: u64 = 0xffff_ffff_8777_8888;

fn regs() -> Regs {
    Regs {
        rax: 0x1111_2222_3333_4444,
        rbx: 0xffff_ffff_8765_4321,
        rsp: TOP,
        rbp: TOP,
        r12: 0xabcd,
        rip: 0xdead,
        rflags: rflags::FIXED | rflags::IF | rflags::CF,
        ..Regs::default()
    }
}

fn stack() -> Words {
    Words::new(TOP - 8, &[0, POPPED_WORD, 0x9999])
}

/// Emulates the instruction `hex` on `regs` and on a stack of a few words. Returns the registers and the stack
/// after it.
fn run(hex: &str, regs: Regs) -> (Regs, Words) {
    let (mut after, mut stack) = (regs, stack());
    let effect = displaced(hex).emulate(&mut after, &mut stack).unwrap();
    assert_eq!(effect, Effect::Done, "{hex}");
    (after, stack)
}

/// Checks that the registers after the instruction `hex` are `expected`, and that the stack is unchanged.
fn check(hex: &str, before: Regs, expected: Regs) {
    let (after, left) = run(hex, before);
    assert_eq!(after, expected, "{hex}");
    assert_eq!(left, stack(), "{hex}");
}

fn next(len: u64) -> u64 {
    AT.0 + len
}

#[test]
fn nops_only_go_on() {
    for (hex, len) in [
        ("90", 1),
        ("0f1f440000", 5),
        ("66662e0f1f840000000000", 11),
        ("f30f1efa", 4),
    ] {
        let rip = next(len);
        check(hex, regs(), Regs { rip, ..regs() });
    }
}

#[test]
fn push_stores_below_and_moves_the_stack_pointer() {
    for (hex, len, pushed) in [
        ("53", 1, regs().rbx),
        ("fff3", 2, regs().rbx),
        ("54", 1, TOP),
        ("6a80", 2, 0xffff_ffff_ffff_ff80),
        ("6800000080", 5, 0xffff_ffff_8000_0000),
        ("9c", 1, regs().rflags),
    ] {
        let (after, stack) = run(hex, regs());
        let (rip, rsp) = (next(len), TOP - 8);
        assert_eq!(after, Regs { rip, rsp, ..regs() }, "{hex}");
        assert_eq!(stack.at(rsp), Some(pushed), "{hex}");
    }
}

#[test]
fn pop_loads_and_moves_the_stack_pointer() {
    let (rip, rsp, r12) = (next(2), TOP + 8, POPPED_WORD);
    let popped = Regs {
        rip,
        rsp,
        r12,
        ..regs()
    };
    check("415c", regs(), popped);
    // After `pop rsp`, RSP is the word that was popped.
    let (rip, rsp) = (next(1), POPPED_WORD);
    check("5c", regs(), Regs { rip, rsp, ..regs() });
}

#[test]
fn leave_takes_the_frame_away() {
    let before = Regs { rsp: 1, ..regs() };
    let left = Regs {
        rip: next(1),
        rsp: TOP + 8,
        rbp: POPPED_WORD,
        ..regs()
    };
    check("c9", before, left);
}

#[test]
fn parts_of_registers_are_written_alone_but_for_32_bits() {
    for (hex, rax) in [
        ("88d8", 0x1111_2222_3333_4421),
        ("88dc", 0x1111_2222_3333_2144),
        ("88f8", 0x1111_2222_3333_4443),
        ("6689d8", 0x1111_2222_3333_4321),
        ("89d8", 0x8765_4321),
        ("8bc3", 0x8765_4321),
        ("4889d8", 0xffff_ffff_8765_4321),
        ("488bc3", 0xffff_ffff_8765_4321),
        ("b080", 0x1111_2222_3333_4480),
        ("b480", 0x1111_2222_3333_8044),
        ("66b80080", 0x1111_2222_3333_8000),
        ("b8000000ff", 0xff00_0000),
        ("48c7c0000000ff", 0xffff_ffff_ff00_0000),
        ("48b80807060504030201", 0x0102_0304_0506_0708),
        ("488d442408", TOP + 8),
        ("488d8300000080", 0xffff_ffff_0765_4321),
        ("488d8424ffffffff", TOP - 1),
        ("678d03", 0x8765_4321),
        ("67488d8300000080", 0x0765_4321),
        ("67488d0425f0ffffff", 0xffff_fff0),
        ("488d0425f0ffffff", 0xffff_ffff_ffff_fff0),
        ("668d03", 0x1111_2222_3333_4321),
        ("4a8d44e301", 0xffff_ffff_8765_4321 + 0xabcd * 8 + 1),
        ("488d05f0ffffff", AT.0 + 7 - 0x10),
        ("8d0500000000", (AT.0 + 6) & 0xffff_ffff),
        ("65488d03", 0xffff_ffff_8765_4321),
    ] {
        let rip = displaced(hex).next().0;
        check(hex, regs(), Regs { rip, rax, ..regs() });
    }
}

#[test]
fn calls_push_the_address_after_themselves() {
    let target = 0xffff_ffff_8765_4321;
    for (hex, len, rip) in [
        ("e8fbffff7f", 5, AT.0.wrapping_add(0x8000_0000)),
        ("ffd3", 2, target),
        ("ff1424", 3, POPPED_WORD),
        ("ff55f8", 3, 0),
        ("3eff1424", 4, POPPED_WORD),
    ] {
        let (after, stack) = run(hex, regs());
        let rsp = TOP - 8;
        assert_eq!(after, Regs { rip, rsp, ..regs() }, "{hex}");
        assert_eq!(stack.at(rsp), Some(next(len)), "{hex}");
    }
    // The target is found before the push moves the stack pointer.
    let rsp = TOP;
    assert_eq!(run("ffd4", Regs { rsp, ..regs() }).0.rip, TOP);
}

#[test]
fn calls_and_jumps_through_memory_near_the_code_read_there() {
    let word = AT.0 + 6 + 0x100;
    for hex in ["ff1500010000", "ff2500010000"] {
        let mut after = regs();
        let mut memory = Words::new(word, &[0x1234]);
        memory.add(TOP - 8, 0);
        let effect = displaced(hex).emulate(&mut after, &mut memory);
        assert_eq!((effect, after.rip), (Ok(Effect::Done), 0x1234), "{hex}");
    }
}

#[test]
fn jumps_go_both_ways() {
    for (hex, rip) in [
        ("ebfe", AT.0),
        ("eb7f", next(2) + 0x7f),
        ("e900000080", next(5) - 0x8000_0000),
        ("ffe3", regs().rbx),
        ("ff2424", POPPED_WORD),
        ("ff6508", 0x9999),
    ] {
        check(hex, regs(), Regs { rip, ..regs() });
    }
}

#[test]
fn returns_release_the_arguments() {
    for (hex, released) in [("c3", 0), ("f3c3", 0), ("c21000", 0x10), ("c2ffff", 0xffff)] {
        let (rip, rsp) = (POPPED_WORD, TOP + 8 + released);
        check(hex, regs(), Regs { rip, rsp, ..regs() });
    }
}

#[test]
fn conditional_jumps_go_on_or_to_their_target() {
    for (hex, flags, rip) in [
        ("7410", rflags::ZF, next(2) + 0x10),
        ("7410", 0, next(2)),
        ("0f85f0ffffff", 0, next(6) - 0x10),
        ("0f85f0ffffff", rflags::ZF, next(6)),
        ("2e7410", rflags::ZF, next(3) + 0x10),
    ] {
        let before = Regs {
            rflags: flags | rflags::FIXED,
            ..regs()
        };
        check(hex, before, Regs { rip, ..before });
    }
}

#[test]
fn pushfq_stores_all_flags_but_resume_and_virtual_8086() {
    let kept = rflags::FIXED | rflags::IF | rflags::DF | rflags::AC | rflags::TF | rflags::ID;
    let before = Regs {
        rflags: kept | rflags::RF | rflags::VM,
        ..regs()
    };
    assert_eq!(run("9c", before).1.at(TOP - 8), Some(kept));
}

/// VIF and VIP.
const VIRTUAL_INTERRUPTS: u64 = 3 << 19;

#[test]
fn popfq_of_the_kernel_loads_all_flags_but_the_virtual_and_the_reserved_ones() {
    for word in [0, u64::MAX, POPPED_WORD] {
        for old in [rflags::FIXED, u64::MAX, VIRTUAL_INTERRUPTS | rflags::FIXED] {
            let mut after = Regs {
                rflags: old,
                ..regs()
            };
            let mut memory = Words::new(TOP, &[word]);
            let effect = displaced("9d").emulate(&mut after, &mut memory);
            assert_eq!((effect, after.rsp), (Ok(Effect::Done), TOP + 8));
            let loaded = 0x24_7fd5;
            assert_eq!(after.rflags & loaded, word & loaded);
            let kept = VIRTUAL_INTERRUPTS | rflags::VM;
            assert_eq!(after.rflags & kept, old & kept);
            assert_eq!(after.rflags & rflags::RF, 0);
            assert_eq!(after.rflags & rflags::FIXED, rflags::FIXED);
        }
    }
    assert_eq!(POPPED, 0x24_7fd5);
}

#[test]
fn sti_leaves_a_shadow_where_it_enables_interrupts() {
    for (was, effect) in [(0, Effect::Shadow), (rflags::IF, Effect::Done)] {
        let rflags = was | rflags::FIXED;
        let mut after = Regs { rflags, ..regs() };
        let found = displaced("fb").emulate(&mut after, &mut Words::default());
        assert_eq!(found, Ok(effect));
        assert_eq!(after.rflags, rflags::IF | rflags::FIXED);
    }
    let after = run("fa", regs()).0;
    assert_eq!(after.rflags, rflags::CF | rflags::FIXED);
    assert_eq!(after.rip, next(1));
}

#[test]
fn the_direction_flag_is_set_and_cleared() {
    let rflags = regs().rflags | rflags::DF;
    assert_eq!(run("fd", regs()).0.rflags, rflags);
    assert_eq!(run("fc", Regs { rflags, ..regs() }).0.rflags, regs().rflags);
}

#[test]
fn resume_flag_ends_with_the_instruction() {
    let before = Regs {
        rflags: regs().rflags | rflags::RF,
        ..regs()
    };
    for hex in ["90", "53", "4883ec08", "ebfe", "c3", "fa", "7400", "c9"] {
        assert_eq!(run(hex, before).0.rflags & rflags::RF, 0, "{hex}");
    }
}

fn fault(hex: &str, before: Regs, mut memory: Words) -> MemoryFault {
    let (mut after, unchanged) = (before, memory.clone());
    let fault = displaced(hex).emulate(&mut after, &mut memory);
    let fault = fault.expect_err(hex);
    assert_eq!(after, before, "{hex}");
    assert_eq!(memory, unchanged, "{hex}");
    fault
}

#[test]
fn a_memory_fault_leaves_everything_alone() {
    for hex in [
        "53",
        "54",
        "6a00",
        "415c",
        "5c",
        "e800000000",
        "ffd3",
        "ff1424",
        "ff2424",
        "9c",
        "9d",
        "c3",
        "c9",
    ] {
        let at = fault(hex, regs(), Words::default()).at.0;
        assert!([TOP, TOP - 8].contains(&at), "{hex}");
    }
    // A call that finds its target but cannot push.
    let target_only = Words::new(TOP, &[POPPED_WORD]);
    assert_eq!(fault("ff1424", regs(), target_only).at, Gva(TOP - 8));
}

#[test]
fn an_address_no_code_can_have_is_not_gone_to() {
    let at = Gva(0x8000_0000_0000);
    let before = Regs {
        rbx: at.0,
        rcx: 2,
        rflags: rflags::ZF,
        ..regs()
    };
    let expected = MemoryFault {
        at,
        cause: WalkError::NonCanonical { at },
    };
    for hex in ["ffd3", "ffe3", "c3", "c20800", "ff1424", "ff2424"] {
        let memory = Words::new(TOP - 8, &[0, at.0]);
        assert_eq!(fault(hex, before, memory), expected, "{hex}");
    }
    let edge = at.wrapping_sub(4);
    for code in [
        &[0xeb_u8, 2][..],
        &[0x74, 2],
        &[0xe2, 2],
        &[0xe8, 0xff, 0xff, 0, 0],
    ] {
        let displaced = classify(code, edge).unwrap();
        let (mut after, mut memory) = (before, stack());
        let fault = displaced.emulate(&mut after, &mut memory).unwrap_err();
        assert!(matches!(fault.cause, WalkError::NonCanonical { .. }));
        assert_eq!((after, memory), (before, stack()));
    }
}

#[test]
fn the_stack_may_wrap_around_the_address_space() {
    let mut after = Regs { rsp: 0, ..regs() };
    let mut memory = Words::new(0_u64.wrapping_sub(8), &[0]);
    let effect = displaced("53").emulate(&mut after, &mut memory);
    assert_eq!(effect, Ok(Effect::Done));
    assert_eq!(after.rsp, 0_u64.wrapping_sub(8));
}

#[test]
fn operations_are_what_the_bytes_say() {
    fn check(hex: &str, expected: Expect) {
        let Action::Emulate(Emulated(operation)) = displaced(hex).action() else {
            panic!("{hex} is emulated");
        };
        expected.assert_eq(&format!("{operation:x?}"));
    }
    check(
        "4883c4f0",
        expect![
            "Binary { operation: Add, to: Register { gpr: Rsp, width: Quad, is_high: false }, from: Constant(fffffffffffffff0) }"
        ],
    );
    check(
        "f6c601",
        expect![
            "Binary { operation: Test, to: Register { gpr: Rdx, width: Byte, is_high: true }, from: Constant(1) }"
        ],
    );
    check(
        "8d4c8340",
        expect![
            "Lea { to: Register { gpr: Rcx, width: Double, is_high: false }, address: Address { base: Some(Rbx), index: Some((Rax, 4)), displacement: 40, is_narrow: false } }"
        ],
    );
    check(
        "ff15f0ffffff",
        expect![
            "Call(Memory(Address { base: None, index: None, displacement: ffffffff8123455d, is_narrow: false }))"
        ],
    );
    check(
        "67e310",
        expect![
            "CountedBranch { count: Zero, counter: Register { gpr: Rcx, width: Double, is_high: false }, target: Gva(0xffffffff8123457a) }"
        ],
    );
    check(
        "f6dc",
        expect!["Unary { operation: Neg, to: Register { gpr: Rax, width: Byte, is_high: true } }"],
    );
    check(
        "7c10",
        expect!["Branch { condition: Condition(c), target: Gva(0xffffffff81234579) }"],
    );
}
