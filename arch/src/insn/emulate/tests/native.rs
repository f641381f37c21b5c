//! Compares emulated instructions with this processor. Each case runs here natively, with registers and flags that
//! the test chooses; its bytes, read back from the test's own code, are then emulated. The state must be the same
//! after both.

use super::super::super::testing::Words;
use super::super::super::{Action, Effect, classify};
use super::TOP;
use crate::Gva;
use crate::regs::{Regs, rflags};
use proptest::prelude::*;
use std::arch::asm;

/// The registers that instructions are tested with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    rax: u64,
    rcx: u64,
    rdx: u64,
    r8: u64,
    /// The arithmetic flags and DF.
    flags: u64,
}

const FLAGS: u64 = rflags::ARITHMETIC | rflags::DF;

/// A few instructions, which leave the stack pointer where it was.
struct Case {
    text: &'static str,
    /// Runs them natively, and returns their bytes.
    native: fn(&mut State) -> &'static [u8],
}

macro_rules! cases {
    ($($text:literal)*) => {
        [$(Case {
            text: $text,
            native: |state| {
                let (start, end): (*const u8, *const u8);
                // SAFETY: the instructions work on the registers named here and on the words below the stack
                // pointer, which `asm!` allows, and they restore the stack pointer. DF ends clear.
                unsafe {
                    asm!(
                        "lea {start}, [rip + 2f]",
                        "lea {end}, [rip + 3f]",
                        "push {flags}",
                        "popfq",
                        "2:",
                        $text,
                        "3:",
                        "pushfq",
                        "pop {flags}",
                        "cld",
                        start = out(reg) start,
                        end = out(reg) end,
                        flags = inout(reg) state.flags,
                        inout("rax") state.rax,
                        inout("rcx") state.rcx,
                        inout("rdx") state.rdx,
                        inout("r8") state.r8,
                    );
                }
                state.flags &= FLAGS;
                // SAFETY: both point into the code above, which is never written.
                unsafe { std::slice::from_raw_parts(start, end.offset_from_unsigned(start)) }
            },
        }),*]
    };
}

/// Emulates the instructions in `code`, one after the other. Returns the state after them.
fn emulated(code: &[u8], state: State) -> State {
    let mut memory = Words::new(TOP - 16, &[0; 2]);
    let mut at = Gva(0xffff_ffff_8100_0000);
    let end = at.wrapping_add(code.len() as u64);
    let other = rflags::FIXED | rflags::IF | rflags::AC;
    let mut regs = Regs {
        rax: state.rax,
        rcx: state.rcx,
        rdx: state.rdx,
        r8: state.r8,
        rsp: TOP,
        rflags: state.flags | other,
        ..Regs::default()
    };
    let mut rest = code;
    while !rest.is_empty() {
        let displaced = classify(rest, at).unwrap();
        assert!(
            matches!(displaced.action(), Action::Emulate(_)),
            "{rest:x?}"
        );
        let effect = displaced.emulate(&mut regs, &mut memory);
        assert_eq!(effect, Ok(Effect::Done));
        rest = &rest[displaced.bytes().len()..];
        at = displaced.next();
        assert_eq!(regs.rip, at.0);
    }
    assert_eq!((at, regs.rsp), (end, TOP));
    assert_eq!(regs.rflags & !FLAGS, other, "no other flag changes");
    State {
        rax: regs.rax,
        rcx: regs.rcx,
        rdx: regs.rdx,
        r8: regs.r8,
        flags: regs.rflags & FLAGS,
    }
}

fn compare(cases: &[Case], before: State) {
    for case in cases {
        let mut native = before;
        let code = (case.native)(&mut native);
        let emulated = emulated(code, before);
        assert_eq!(
            emulated, native,
            "{} ({code:02x?}) of {before:x?}",
            case.text
        );
    }
}

#[rustfmt::skip]
const ARITHMETIC: &[Case] = &cases![
    "add al, cl" "add ah, dl" "add cl, ch" "add ax, cx" "add eax, ecx" "add rax, rcx"
    "add r8b, al" "add r8w, ax" "add r8d, eax" "add r8, rax" "add rax, rax"
    "add al, 0x7f" "add dh, -1" "add ax, 0x1234" "add cx, -2" "add eax, 0x12345678"
    "add ecx, -1" "add rax, 0x12345678" "add rcx, -0x80000000" "add rdx, 8" "add rdx, -128"
    "sub al, cl" "sub ah, dl" "sub ax, cx" "sub eax, ecx" "sub rax, rcx" "sub rax, rax"
    "sub al, 0x7f" "sub dh, -1" "sub ax, 0x1234" "sub cx, -2" "sub eax, 0x12345678"
    "sub ecx, -1" "sub rax, 0x12345678" "sub rcx, -0x80000000" "sub rdx, 8" "sub r8d, 1"
    "cmp al, cl" "cmp ah, dl" "cmp ax, cx" "cmp eax, ecx" "cmp rax, rcx" "cmp rax, -1"
    "cmp al, 0x80" "cmp dh, 1" "cmp ax, 0x8000" "cmp eax, 0x80000000" "cmp r8, 0x7fffffff"
    "inc al" "inc ah" "inc ax" "inc eax" "inc rax" "inc r8b"
    "dec al" "dec ah" "dec ax" "dec eax" "dec rax" "dec r8d"
    "neg al" "neg ah" "neg ax" "neg eax" "neg rax" "neg r8"
    ".byte 0x48, 0x03, 0xc1" ".byte 0x02, 0xc1" ".byte 0x2b, 0xc1" ".byte 0x3a, 0xe1"
];

#[rustfmt::skip]
const LOGIC: &[Case] = &cases![
    "and al, cl" "and ah, dl" "and ax, cx" "and eax, ecx" "and rax, rcx"
    "and al, 0x7f" "and dh, -1" "and ax, 0x1234" "and eax, 0x12345678" "and rcx, -16"
    "or al, cl" "or ah, dl" "or ax, cx" "or eax, ecx" "or rax, rcx" "or rax, -1" "or r8d, 0x80"
    "xor al, cl" "xor ah, ah" "xor ax, cx" "xor eax, eax" "xor r8d, r8d" "xor rax, rcx"
    "xor rax, -1" "xor ch, 0x55" "xor ecx, 0x55555555"
    "test al, cl" "test ah, dl" "test ax, cx" "test eax, ecx" "test rax, rax" "test r8, rcx"
    "test al, 0x80" "test dh, 1" "test ax, 0x8000" "test eax, 0x80000000" "test rcx, -8"
    "not al" "not ah" "not ax" "not eax" "not rax"
    "clc" "stc" "cmc" "cld" "std" "nop" "endbr64" "nop word ptr [rax + rcx]"
];

#[rustfmt::skip]
const MOVES: &[Case] = &cases![
    "mov al, cl" "mov ah, dl" "mov cl, ah" "mov dh, ch" "mov r8b, dl" "mov ax, cx"
    "mov eax, ecx" "mov eax, eax" "mov rax, rcx" "mov r8, rdx" "mov r8d, edx"
    "mov al, 0x80" "mov ah, 0x80" "mov ax, 0x8000" "mov eax, 0x80000000" "mov rax, -1"
    "movabs rax, 0x123456789abcdef0" ".byte 0x48, 0x8b, 0xc1" ".byte 0x8a, 0xe1"
    "lea rax, [rcx]" "lea rax, [rcx + rdx * 8 - 1]" "lea eax, [rcx + rdx * 4 + 0x12345678]"
    "lea ax, [rcx + rax]" "lea rax, [ecx + edx * 2]" "lea eax, [ecx - 1]" "lea rax, [r8 + r8]"
    "lea rax, [rdx * 8 + 0x1000]" "lea rax, [-8]" "lea rcx, [rcx + rcx * 4]"
    "lea rax, [ecx * 4 - 0x80000000]" "lea r8w, [edx - 3]" "lea rax, fs:[rcx + 1]"
    "push rax; pop rcx" "push 0x7f; pop rdx" "push -0x80; pop r8" "push -0x80000000; pop rax"
    "push 0x12345678; pop rax" "push r8; pop rax" "push rax; push rcx; pop rax; pop rcx"
];

/// Restricts the flags to those that `popfq` loads here without harm.
fn tame(state: State) -> State {
    State {
        flags: state.flags & FLAGS | rflags::FIXED,
        ..state
    }
}

const EDGES: [u64; 12] = [
    0,
    1,
    0xf,
    0x10,
    0x7f,
    0x80,
    0x7fff,
    0x8000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_fff8,
    u64::MAX,
];

#[test]
fn operations_agree_with_this_processor_at_every_edge() {
    for rax in EDGES {
        for rcx in EDGES {
            for flags in [0, FLAGS] {
                let state = tame(State {
                    rax,
                    rcx,
                    rdx: rcx.rotate_left(8),
                    r8: rax ^ rcx,
                    flags,
                });
                compare(ARITHMETIC, state);
                compare(LOGIC, state);
            }
        }
    }
}

proptest! {
    #[test]
    fn operations_agree_with_this_processor(
        rax in any::<u64>(), rcx in any::<u64>(), rdx in any::<u64>(), r8 in any::<u64>(),
        flags in any::<u64>(),
    ) {
        let state = tame(State { rax, rcx, rdx, r8, flags });
        compare(ARITHMETIC, state);
        compare(LOGIC, state);
        compare(MOVES, state);
    }
}
