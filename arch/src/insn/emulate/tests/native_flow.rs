//! Compares emulated jumps, calls, returns and flags with this processor.

use super::super::super::testing::{Words, displaced};
use super::super::flow::{Condition, Count};
use super::super::operand::{Register, Width};
use crate::regs::{Gpr, Regs, rflags};
use std::arch::asm;

macro_rules! conditions {
    ($($set:literal)*) => {
        [$(|flags: u64| {
            let holds: u8;
            // SAFETY: nothing but registers, flags and one balanced push is touched.
            unsafe {
                asm!("push {flags}", "popfq", concat!($set, " {holds}"),
                     flags = in(reg) flags, holds = lateout(reg_byte) holds);
            }
            holds == 1
        }),*]
    };
}

/// For each of the sixteen conditions, a function that returns whether it holds on this processor.
#[rustfmt::skip]
const CONDITIONS: [fn(u64) -> bool; 16] = conditions![
    "seto" "setno" "setb" "setae" "sete" "setne" "setbe" "seta"
    "sets" "setns" "setp" "setnp" "setl" "setge" "setle" "setg"
];

#[test]
fn conditions_agree_with_this_processor_for_all_flags() {
    for (code, holds) in (0_u8..).zip(CONDITIONS) {
        for flags in (0..0x1000).filter(|flags| flags & !rflags::ARITHMETIC == 0) {
            assert_eq!(
                Condition(code).holds(flags),
                holds(flags | rflags::FIXED),
                "condition {code} of {flags:#x}"
            );
        }
    }
}

macro_rules! counts {
    ($(($branch:literal, $count:expr, $width:expr))*) => {
        [$(($branch, $count, $width, |mut rcx: u64, flags: u64| {
            let taken: u64;
            // SAFETY: nothing but registers, flags and one balanced push is touched.
            unsafe {
                asm!(
                    "push {flags}",
                    "popfq",
                    concat!($branch, " 2f"),
                    "mov {taken:e}, 0",
                    "jmp 3f",
                    "2:",
                    "mov {taken:e}, 1",
                    "3:",
                    flags = in(reg) flags, taken = out(reg) taken, inout("rcx") rcx,
                );
            }
            (rcx, taken == 1)
        }),)*]
    };
}

type Branch = fn(u64, u64) -> (u64, bool);

const COUNTS: [(&str, Count, Width, Branch); 8] = counts![("jrcxz", Count::Zero, Width::Quad)
    ("jecxz", Count::Zero, Width::Double)
    ("loop", Count::Down, Width::Quad)
    ("loope", Count::DownWhileEqual, Width::Quad)
    ("loopne", Count::DownWhileNotEqual, Width::Quad)
    // With the address-size prefix.
    (".byte 0x67; loop", Count::Down, Width::Double)(
    ".byte 0x67; loope",
    Count::DownWhileEqual,
    Width::Double
)(
    ".byte 0x67; loopne",
    Count::DownWhileNotEqual,
    Width::Double
)];

#[test]
fn counted_branches_agree_with_this_processor() {
    for (text, count, width, branch) in COUNTS {
        for rcx in [0, 1, 2, 1 << 32, (1 << 32) + 1, 0xffff_ffff, u64::MAX] {
            for flags in [rflags::FIXED, rflags::FIXED | rflags::ZF] {
                let mut regs = Regs {
                    rcx,
                    rflags: flags,
                    ..Regs::default()
                };
                let counter = Register {
                    gpr: Gpr::Rcx,
                    width,
                    is_high: false,
                };
                let is_taken = count.is_taken(counter, &mut regs);
                assert_eq!(regs.rflags, flags);
                assert_eq!(
                    (regs.rcx, is_taken),
                    branch(rcx, flags),
                    "{text} of {rcx:#x}"
                );
            }
        }
    }
}

#[test]
fn counted_branches_are_distinguished() {
    // A branch that is taken leads to 0x10 bytes past its end.
    for (hex, rcx, rflags, left, is_taken) in [
        ("e310", 0, 0, 0, true),
        ("e310", 1 << 32, 0, 1 << 32, false),
        ("67e310", 1 << 32, 0, 1 << 32, true),
        ("e210", 2, 0, 1, true),
        ("e210", 1, 0, 0, false),
        ("67e210", 1 << 32, 0, 0xffff_ffff, true),
        ("e110", 2, rflags::ZF, 1, true),
        ("e110", 2, 0, 1, false),
        ("e010", 2, 0, 1, true),
        ("e010", 2, rflags::ZF, 1, false),
    ] {
        let instruction = displaced(hex);
        let mut regs = Regs {
            rcx,
            rflags,
            ..Regs::default()
        };
        let effect = instruction.emulate(&mut regs, &mut Words::default());
        assert!(effect.is_ok());
        let rip = instruction.next().0 + if is_taken { 0x10 } else { 0 };
        assert_eq!(
            (regs.rcx, regs.rip, regs.rflags),
            (left, rip, rflags),
            "{hex}"
        );
    }
}

#[test]
fn the_stack_of_calls_and_returns_agrees_with_this_processor() {
    let (before, released, popped, pushed, past_push): (u64, u64, u64, u64, u64);
    // SAFETY: at the end, the stack pointer is where it was before, because it is restored from `before`.
    unsafe {
        asm!(
            "mov {before}, rsp",
            // `ret 16`, to the label.
            "sub rsp, 16",
            "lea {popped}, [rip + 2f]",
            "push {popped}",
            "ret 16",
            "2:",
            "mov {released}, rsp",
            "mov rsp, {before}",
            // `call [rsp]`: the target is read before the push.
            "lea {popped}, [rip + 3f]",
            "push {popped}",
            "call [rsp]",
            "3:",
            "mov {past_push}, rsp",
            "mov rsp, {before}",
            "push rsp",
            "pop {pushed}",
            "push {before}",
            "pop rsp",
            "mov {popped}, rsp",
            "mov rsp, {before}",
            before = out(reg) before,
            released = out(reg) released,
            popped = out(reg) popped,
            pushed = out(reg) pushed,
            past_push = out(reg) past_push,
        );
    }
    assert_eq!((released, past_push), (before, before - 16));
    assert_eq!((pushed, popped), (before, before));

    let run = |hex: &str, rsp: u64| {
        let mut regs = Regs {
            rsp,
            ..Regs::default()
        };
        let mut memory = Words::new(before - 24, &[before; 4]);
        let effect = displaced(hex).emulate(&mut regs, &mut memory);
        assert!(effect.is_ok());
        (regs, memory)
    };
    assert_eq!(run("c21000", before - 24).0.rsp, released);
    assert_eq!(run("ff1424", before - 8).0.rsp, past_push);
    let (after, memory) = run("54", before);
    assert_eq!(memory.at(after.rsp), Some(pushed));
    assert_eq!(run("5c", before - 8).0.rsp, popped);
}

#[test]
fn leave_agrees_with_this_processor() {
    let (before, after, frame): (u64, u64, u64);
    // SAFETY: at the end, RSP and RBP are as they were before.
    unsafe {
        asm!(
            "mov {kept}, rbp",
            "mov {before}, rsp",
            "push 0x1234",
            "mov rbp, rsp",
            "sub rsp, 64",
            "leave",
            "mov {frame}, rbp",
            "mov {after}, rsp",
            "mov rbp, {kept}",
            kept = out(reg) _,
            before = out(reg) before,
            after = out(reg) after,
            frame = out(reg) frame,
        );
    }
    let mut regs = Regs {
        rsp: before - 72,
        rbp: before - 8,
        ..Regs::default()
    };
    let effect = displaced("c9").emulate(&mut regs, &mut Words::new(before - 8, &[0x1234]));
    assert!(effect.is_ok());
    assert_eq!((regs.rsp, regs.rbp), (after, frame));
}

#[test]
fn popfq_agrees_with_this_processor_where_user_code_may_do_the_same() {
    // User code loads neither IF nor IOPL, and with TF would trap.
    let privileged = rflags::IF | rflags::IOPL | rflags::TF;
    for word in [0, u64::MAX, rflags::RF | rflags::VM, 0xffff_ffff_0000_802a] {
        let word = word & !privileged;
        let (before, after): (u64, u64);
        // SAFETY: at the end, the flags are as they were before.
        unsafe {
            asm!(
                "pushfq",
                "pop {before}",
                "push {word}",
                "popfq",
                "pushfq",
                "pop {after}",
                "push {before}",
                "popfq",
                word = in(reg) word,
                before = out(reg) before,
                after = out(reg) after,
            );
        }
        let mut regs = Regs {
            rsp: 0x1000,
            rflags: before,
            ..Regs::default()
        };
        let effect = displaced("9d").emulate(&mut regs, &mut Words::new(0x1000, &[word]));
        assert!(effect.is_ok());
        assert_eq!(regs.rflags & !privileged, after & !privileged, "{word:#x}");
    }
}
