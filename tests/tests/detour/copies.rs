//! Tests every kind of copied instruction, and the int3s inside the jump.

use super::compare::{Seen, compare, stack_pointer};
use super::{assemble, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Capture, Member, Part, Recorder, Span};
use hvprobe_fixtures::rounds;
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::differential::random::Random;
use iced_x86::code_asm::{CodeAssembler, byte_ptr, dword_ptr, qword_ptr, registers::*};
use iced_x86::{Code, Decoder, IcedError, Instruction, MemoryOperand, Register};

type Build = fn(&mut CodeAssembler, &Bench<'_>) -> Result<(), IcedError>;
type Setup = fn(&Bench<'_>, &mut State, &mut [u8], &mut [u8]);

/// A function whose first instructions are displaced; it ends with a jump to the first exit.
struct Case {
    name: &'static str,
    build: Build,
    setup: Setup,
}

fn nothing(_: &Bench<'_>, _: &mut State, _: &mut [u8], _: &mut [u8]) {}

/// Returns the address at `offset` in the data page.
fn data(bench: &Bench<'_>, offset: u64) -> u64 {
    bench.arena().data().start.0 + offset
}

/// Assembles a short branch and two jumps: the next instruction jumps to the first exit, the target of the branch
/// jumps to the second.
fn branch(
    a: &mut CodeAssembler,
    bench: &Bench<'_>,
    branch: fn(&mut CodeAssembler, iced_x86::code_asm::CodeLabel) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    let mut taken = a.create_label();
    branch(a, taken)?;
    a.nop_1(dword_ptr(rax))?;
    a.jmp(bench.exit(0).0)?;
    a.set_label(&mut taken)?;
    a.jmp(bench.exit(1).0)
}

/// Writes the address of the second exit to offset 0x80 of the data page, to the word at the stack pointer, and to
/// RAX. Makes RBX point at the word in the data page.
fn leads_out(bench: &Bench<'_>, state: &mut State, stack: &mut [u8], data: &mut [u8]) {
    let exit = bench.exit(1).0.to_le_bytes();
    data[0x80..0x88].copy_from_slice(&exit);
    let at = state.regs.rsp - bench.arena().stack().start.0;
    let at = usize::try_from(at).unwrap();
    stack[at..at + 8].copy_from_slice(&exit);
    state.regs.rax = bench.exit(1).0;
    state.regs.rbx = bench.arena().data().start.0 + 0x80;
}

/// Limits RCX to 0 or 1, so that `jrcxz` and `loop` sometimes branch and sometimes do not.
fn counts(_: &Bench<'_>, state: &mut State, _: &mut [u8], _: &mut [u8]) {
    state.regs.rcx &= 1;
}

/// Adds an instruction with a RIP-relative operand in the data page.
fn relative(
    a: &mut CodeAssembler,
    bench: &Bench<'_>,
    with: impl FnOnce(MemoryOperand) -> Result<Instruction, IcedError>,
) -> Result<(), IcedError> {
    let at = i64::try_from(data(bench, 0x80)).unwrap();
    a.add_instruction(with(MemoryOperand::with_base_displ(Register::RIP, at))?)
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case { name: "nop", setup: nothing, build: |a, _| {
        a.nop_1(dword_ptr(rax + rax * 1 + 0x12))
    } },
    Case { name: "prologue", setup: nothing, build: |a, _| {
        a.push(rbp)?; a.mov(rbp, rsp)?; a.push(r15)
    } },
    Case { name: "flags and a conditional move", setup: nothing, build: |a, _| {
        a.adc(rax, rcx)?; a.cmovl(rdx, rsi)
    } },
    Case { name: "direction", setup: nothing, build: |a, _| {
        a.std()?; a.cmc()?; a.sub(rsp, 0x10)
    } },
    Case { name: "pushed flags", setup: nothing, build: |a, _| {
        a.pushfq()?; a.pop(rax)?; a.push(0x1234567)
    } },
    Case { name: "vectors", setup: nothing, build: |a, _| {
        a.paddq(xmm3, xmm15)?; a.pxor(xmm0, xmm4)
    } },
    Case { name: "the stack pointer itself", setup: nothing, build: |a, _| {
        a.mov(rax, rsp)?; a.pop(rsp)?; a.mov(rsp, rax)
    } },
    Case { name: "words above the stack pointer", setup: nothing, build: |a, _| {
        a.mov(rax, qword_ptr(rsp + 8))?; a.inc(byte_ptr(rsp))
    } },
    Case { name: "relative load", setup: nothing, build: |a, bench| {
        relative(a, bench, |at| Instruction::with2(Code::Mov_r64_rm64, Register::RDI, at))
    } },
    Case { name: "relative address", setup: nothing, build: |a, bench| {
        relative(a, bench, |at| Instruction::with2(Code::Lea_r64_m, Register::RSI, at))
    } },
    Case { name: "relative store with a constant behind the displacement", setup: nothing, build: |a, bench| {
        relative(a, bench, |at| Instruction::with2(Code::Mov_rm64_imm32, at, 0x1234_i32))
    } },
    Case { name: "relative operand second", setup: nothing, build: |a, bench| {
        a.push(rdx)?;
        relative(a, bench, |at| Instruction::with2(Code::Add_rm32_imm8, at, -3_i32))
    } },
    Case { name: "short branch", setup: nothing, build: |a, bench| {
        branch(a, bench, |a, to| a.jo(to))
    } },
    Case { name: "another short branch", setup: nothing, build: |a, bench| {
        branch(a, bench, |a, to| a.jle(to))
    } },
    Case { name: "near branch", setup: nothing, build: |a, bench| {
        a.jb(bench.exit(1).0)
    } },
    Case { name: "jrcxz", setup: counts, build: |a, bench| {
        branch(a, bench, |a, to| a.jrcxz(to))
    } },
    Case { name: "loop", setup: counts, build: |a, bench| {
        branch(a, bench, |a, to| a.loop_(to))
    } },
    Case { name: "jump", setup: nothing, build: |a, bench| {
        a.jmp(bench.exit(1).0)
    } },
    Case { name: "short jump", setup: nothing, build: |a, bench| {
        branch(a, bench, |a, to| a.jmp(to))
    } },
    Case { name: "jump through memory", setup: leads_out, build: |a, bench| {
        relative(a, bench, |at| Instruction::with1(Code::Jmp_rm64, at))
    } },
    Case { name: "call", setup: nothing, build: |a, bench| {
        a.call(bench.exit(1).0)
    } },
    Case { name: "call last", setup: nothing, build: |a, bench| {
        a.push(rbx)?; a.xchg(rax, rdx)?; a.call(bench.exit(2).0)
    } },
    Case { name: "call through a register", setup: leads_out, build: |a, _| {
        a.mov(rcx, rax)?; a.call(rax)
    } },
    Case { name: "call through a high register", setup: leads_out, build: |a, _| {
        a.mov(r15, rax)?; a.call(r15)
    } },
    Case { name: "call through memory", setup: leads_out, build: |a, _| {
        a.push(rcx)?; a.xchg(rdx, rsi)?; a.call(qword_ptr(rbx + 0))
    } },
    Case { name: "call through memory and an index", setup: leads_out, build: |a, _| {
        a.xor(ecx, ecx)?; a.call(qword_ptr(rbx + rcx * 8))
    } },
    Case { name: "call through relative memory", setup: leads_out, build: |a, bench| {
        relative(a, bench, |at| Instruction::with1(Code::Call_rm64, at))
    } },
    Case { name: "return", setup: leads_out, build: |a, _| {
        a.xor(eax, eax)?; a.mov(ecx, edx)?; a.ret()
    } },
    Case { name: "return that releases arguments", setup: leads_out, build: |a, _| {
        a.nop()?; a.nop()?; a.ret_1(0x18)
    } },
];

/// Writes the function, which consists of the instructions of `build` and a jump to the first exit. Returns its
/// code.
fn function(bench: &Bench<'_>, build: Build) -> Vec<u8> {
    let arena = bench.arena();
    assemble(arena, arena.function(), |a| {
        build(a, bench)?;
        a.jmp(bench.exit(0).0)
    })
}

#[test]
fn every_kind_of_copy_does_what_the_original_does() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let mut seen = Seen::default();
    for (number, case) in (0..).zip(CASES) {
        let code = function(&bench, case.build);
        let span = Span::find(&code, arena.function(), arena.function()).unwrap();
        let mut random = Random::new(&[1, number]);
        for _ in 0..rounds(150) {
            let setup = |state: &mut State, stack: &mut [u8], data: &mut [u8]| {
                (case.setup)(&bench, state, stack, data);
            };
            compare(&bench, &span, case.name, &mut random, setup, &mut seen);
        }
    }
    assert!(seen.escapes > rounds(100), "{}", seen.escapes);
    assert!(seen.records > rounds(2000), "{}", seen.records);
    assert!(seen.vetoed > rounds(500), "{}", seen.vetoed);
}

#[test]
fn a_return_address_beyond_32_bits_is_pushed_whole() {
    // The code does not run at this address, so the test checks its bytes. Two instructions push the return
    // address.
    let code = [0xe8, 0xfb, 0x0f, 0, 0];
    let at = Gva(0x1_2345_6780);
    let span = Span::find(&code, at, at).unwrap();
    let arena = Arena::new().unwrap();
    let detour = Recorder::new(&span, &quiet(&arena, 64), &[])
        .unwrap()
        .place(Gva(0x1_0000_0000))
        .unwrap();
    let tail = usize::try_from(detour.tail().0 - detour.at().0).unwrap();
    let mut decoder = Decoder::with_ip(64, &detour.code()[tail..], detour.tail().0, 0);
    let text: Vec<String> = decoder.iter().take(3).map(|i| i.to_string()).collect();
    assert_eq!(
        text,
        [
            "push 23456785h",
            "mov dword ptr [rsp+4],1",
            "jmp 0000000123457780h"
        ]
    );
}

#[test]
fn whoever_was_interrupted_inside_the_jump_goes_on_in_the_copy() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let builds: [(&[u64], Build); 3] = [
        (&[1], |a, _| {
            a.push(rbx)?;
            a.lea(rbx, qword_ptr(rbx + rcx * 2))
        }),
        (&[2], |a, _| {
            a.push(r12)?;
            a.add(rdi, 0x80)
        }),
        (&[1, 2], |a, _| {
            a.push(rbx)?;
            a.push(rdi)?;
            a.mov(ebx, 0x1234)
        }),
    ];
    let mut random = Random::new(&[2]);
    for (boundaries, build) in builds {
        let code = function(&bench, build);
        let span = Span::find(&code, arena.function(), arena.function()).unwrap();
        assert_eq!(span.interior().collect::<Vec<_>>(), boundaries);
        assert!(!span.needs_quiescence());
        let ring = quiet(&arena, 64);
        let member = Member {
            conditions: &[],
            vetoed: arena.counter(1),
            part: Part::Record {
                source: 1,
                capture: &Capture::default(),
                lost: arena.counter(0),
                waits: false,
            },
        };
        let detour = Room::new(&arena).detour(&span, &ring, &[member]).unwrap();
        for boundary in boundaries {
            let at = arena.function().wrapping_add(*boundary);
            let rsp_is = stack_pointer(&mut random, &arena);
            let state = State::random(&mut random, rsp_is);
            let whole = arena.stack().end.0 - arena.stack().start.0;
            let stack = vec![0x55; usize::try_from(whole).unwrap()];
            let run = || {
                arena.write(arena.stack().start, &stack);
                let left = bench.run(at, &state);
                let used = arena.stack().end.0 - left.state.regs.rsp;
                let stack = arena.read(Gva(left.state.regs.rsp), usize::try_from(used).unwrap());
                (left, stack)
            };
            let in_place = run();
            let planted = Planted::new(&arena, &span, &detour);
            assert_eq!(arena.read(at, 1), [0xcc]);
            assert!(in_place == run(), "from {boundary}");
            assert_eq!(planted.resumed(), 1);
        }
        let mut reader = Reader::new(&arena, ring);
        assert_eq!(reader.next_record(), Ok(None), "these were no hits");
    }
}
