//! A detour against the instructions it displaces: registers, flags, vector registers, the stack from
//! the stack pointer on, and memory must be the same after both; and the records must tell exactly
//! what was there before.

use super::{assemble, no_registers, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::detour::{Capture, Layout, Member, Part, Span, Unfit};
use hvprobe_arch::regs::{Gpr, RegisterSet, rflags};
use hvprobe_tests::detour::arena::{Arena, COMM_TEXT, CPU, PID_AND_TGID};
use hvprobe_tests::detour::bench::{Bench, Left, State};
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::differential::text::{Text, stock_kernel};
use iced_x86::code_asm::{CodeAssembler, byte_ptr, dword_ptr, qword_ptr, registers::*};
use iced_x86::{Code, Decoder, IcedError, Instruction, MemoryOperand, Mnemonic, OpKind, Register};
use std::arch::x86_64::_rdtsc;
use std::sync::atomic::Ordering;

/// Stack that instructions may use below and above the stack pointer.
const AROUND: u64 = 0x3000;

fn tsc() -> u64 {
    // SAFETY: it only reads the counter.
    unsafe { _rdtsc() }
}

/// A stack pointer: in the middle of a page, or so near its end that stack words leave it.
fn stack_pointer(random: &mut Random, arena: &Arena) -> Gva {
    let stack = arena.stack();
    let pages = (stack.end.0 - stack.start.0 - 2 * AROUND) / 4096;
    let page = stack.start.0 + AROUND + 4096 * random.below(pages);
    let offset = match random.below(3) {
        0 => 4096 - 8 * (1 + random.below(8)),
        _ => 8 * random.below(512),
    };
    let odd = if random.chance(10) {
        random.below(8)
    } else {
        0
    };
    Gva(page + offset + odd)
}

fn capture(random: &mut Random, arena: &Arena) -> Capture {
    let registers = match random.below(3) {
        0 => RegisterSet::default(),
        1 => no_registers(),
        _ => Gpr::ALL.into_iter().filter(|_| random.chance(40)).collect(),
    };
    let words = random.below(6);
    Capture {
        registers,
        stack: (0..words)
            .map(|_| u16::try_from(random.below(8)).unwrap())
            .collect(),
        task: random.chance(50).then(|| arena.task()),
        cpu: random.chance(50).then(|| arena.cpu()),
    }
}

fn condition(random: &mut Random, state: &State) -> Condition {
    let register = random.pick(&Gpr::ALL);
    let own = state.regs.get(register);
    Condition {
        register,
        comparison: random.pick(&[
            Comparison::Equal,
            Comparison::NotEqual,
            Comparison::Less,
            Comparison::LessOrEqual,
            Comparison::Greater,
            Comparison::GreaterOrEqual,
            Comparison::AnyBit,
        ]),
        value: match random.below(4) {
            0 => own,
            1 => own.wrapping_add(1),
            2 => own.wrapping_sub(1),
            _ => random.value(),
        },
    }
}

/// What can be seen after the code has run.
struct After {
    left: Left,
    /// From the start of the stack's memory on.
    stack: Vec<u8>,
    data: Vec<u8>,
}

impl After {
    /// Whether `other`'s stack is the same: at and above the stack pointer from before, and where
    /// there are words that this has pushed.
    fn has_stack_of(&self, other: &Self, before: &[u8], start: Gva, top: u64) -> bool {
        (start.0..)
            .zip(self.stack.iter().zip(&other.stack).zip(before))
            .filter(|(at, _)| *at >= self.left.state.regs.rsp)
            .all(|(at, ((one, two), before))| one == two || at < top && one == before)
    }
}

/// Runs the function from these beginnings.
fn run(bench: &Bench<'_>, state: &State, stack: &[u8], data: &[u8]) -> After {
    let arena = bench.arena();
    arena.write(arena.stack().start, stack);
    arena.write(arena.data().start, data);
    let left = bench.run(arena.function(), state);
    After {
        stack: arena.read(arena.stack().start, stack.len()),
        data: arena.read(arena.data().start, data.len()),
        left,
    }
}

/// How often detours were left at their escape.
#[derive(Default)]
struct Seen {
    escapes: u64,
    records: u64,
    vetoed: u64,
}

/// Compares both ways for one state, with one to three random members.
fn compare(
    bench: &Bench<'_>,
    span: &Span,
    name: &str,
    random: &mut Random,
    setup: impl Fn(&mut State, &mut [u8], &mut [u8]),
    seen: &mut Seen,
) {
    let arena = bench.arena();
    let (lost, vetoed) = (arena.counter(0), arena.counter(1));
    let rsp_is = stack_pointer(random, arena);
    let mut state = State::random(random, rsp_is);
    let len = |range: std::ops::Range<Gva>| usize::try_from(range.end.0 - range.start.0).unwrap();
    let mut bytes = |len: usize| -> Vec<u8> {
        let words = (0..len / 8).flat_map(|_| random.next().to_le_bytes());
        words.collect()
    };
    let (mut stack, mut data) = (bytes(len(arena.stack())), bytes(len(arena.data())));
    setup(&mut state, &mut stack, &mut data);
    let in_place = run(bench, &state, &stack, &data);

    let captures: Vec<Capture> = (0..=random.below(3))
        .map(|_| capture(random, arena))
        .collect();
    let conditions: Vec<Vec<Condition>> = captures
        .iter()
        .map(|_| {
            (0..random.below(3))
                .map(|_| condition(random, &state))
                .collect()
        })
        .collect();
    let members: Vec<Member<'_>> = (77..)
        .zip(captures.iter().zip(&conditions))
        .map(|(source, (capture, conditions))| Member {
            conditions,
            vetoed,
            part: Part::Record {
                source,
                capture,
                lost,
            },
        })
        .collect();
    let ring = quiet(arena, 64);
    let mut room = Room::new(arena);
    let detour = room.detour(span, &ring, &members).unwrap();
    let planted = Planted::new(arena, span, &detour);
    let vetoed_before = arena.word(vetoed).load(Ordering::SeqCst);
    let mut reader = Reader::new(arena, ring);
    let began = tsc();
    let detoured = run(bench, &state, &stack, &data);
    let ended = tsc();
    let what = || format!("{name}: {:02x?} with {state:x?}", span.bytes());
    assert!(
        in_place.left == detoured.left,
        "{}\n{:x?}\n{:x?}",
        what(),
        in_place.left,
        detoured.left
    );
    let is_same = in_place.has_stack_of(&detoured, &stack, arena.stack().start, state.regs.rsp);
    assert!(is_same, "stack after {}", what());
    assert!(in_place.data == detoured.data, "memory after {}", what());

    let word = |index: u16| {
        let at = state.regs.rsp - arena.stack().start.0 + 8 * u64::from(index);
        let at = usize::try_from(at).unwrap();
        u64::from_le_bytes(stack[at..at + 8].try_into().unwrap())
    };
    let highest = captures.iter().flat_map(|capture| &capture.stack).max();
    let leaves_page =
        highest.is_some_and(|index| state.regs.rsp % 4096 + 8 * u64::from(*index) + 8 > 4096);
    assert_eq!(planted.escapes(), u64::from(leaves_page), "{}", what());
    seen.escapes += planted.escapes();
    let mut vetoes = 0;
    let mut time = began;
    for ((source, capture), conditions) in (77..).zip(&captures).zip(&conditions) {
        let holds = |condition: &Condition| condition.holds(state.regs.get(condition.register));
        if leaves_page {
            continue;
        }
        if !conditions.iter().all(holds) {
            vetoes += 1;
            continue;
        }
        let layout = Layout::new(capture).unwrap();
        let (header, bytes) = reader.next_record().unwrap().expect("a record");
        let record = layout.decode(&bytes).unwrap();
        assert_eq!((header.source, header.cells), (source, layout.cells()));
        let mut regs = state.regs;
        regs.rflags |= rflags::FIXED | rflags::IF;
        for register in Gpr::ALL {
            if !capture.registers.contains(register) {
                regs.set(register, 0);
            }
        }
        assert_eq!(record.regs, regs, "{}", what());
        let words: Vec<u64> = capture.stack.iter().map(|index| word(*index)).collect();
        assert_eq!(record.stack.as_slice(), words);
        assert!((time..ended).contains(&record.tsc));
        time = record.tsc;
        assert_eq!(record.cpu, capture.cpu.map(|_| CPU));
        assert_eq!(record.task.is_some(), capture.task.is_some());
        if let Some(task) = record.task {
            assert_eq!((task.pid, task.tgid), PID_AND_TGID);
            assert_eq!(&task.comm, COMM_TEXT);
        }
        seen.records += 1;
    }
    assert_eq!(reader.next_record(), Ok(None), "no more records");
    let vetoed_after = arena.word(vetoed).load(Ordering::SeqCst);
    assert_eq!(vetoed_after - vetoed_before, vetoes);
    seen.vetoed += vetoes;
    assert_eq!(arena.word(lost).load(Ordering::SeqCst), 0);
}

type Build = fn(&mut CodeAssembler, &Bench<'_>) -> Result<(), IcedError>;
type Setup = fn(&Bench<'_>, &mut State, &mut [u8], &mut [u8]);

/// A function whose first instructions are displaced; it ends with a jump to the first exit.
struct Case {
    name: &'static str,
    build: Build,
    setup: Setup,
}

fn nothing(_: &Bench<'_>, _: &mut State, _: &mut [u8], _: &mut [u8]) {}

/// A word of the data page, by its offset.
fn data(bench: &Bench<'_>, offset: u64) -> u64 {
    bench.arena().data().start.0 + offset
}

/// A short branch over the first exit, to the second.
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

/// Makes the word at offset 0x80 of the data page, and that at the stack pointer, lead to the second
/// exit.
fn leads_out(bench: &Bench<'_>, state: &mut State, stack: &mut [u8], data: &mut [u8]) {
    let exit = bench.exit(1).0.to_le_bytes();
    data[0x80..0x88].copy_from_slice(&exit);
    let at = state.regs.rsp - bench.arena().stack().start.0;
    let at = usize::try_from(at).unwrap();
    stack[at..at + 8].copy_from_slice(&exit);
    state.regs.rax = bench.exit(1).0;
    state.regs.rbx = bench.arena().data().start.0 + 0x80;
}

/// Small counters, so that loops end either way.
fn counts(_: &Bench<'_>, state: &mut State, _: &mut [u8], _: &mut [u8]) {
    state.regs.rcx &= 1;
}

/// Adds an instruction with one operand in the data page, found relative to RIP.
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

/// Writes the function: what `build` makes, and a jump to the first exit.
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
        for _ in 0..150 {
            let setup = |state: &mut State, stack: &mut [u8], data: &mut [u8]| {
                (case.setup)(&bench, state, stack, data);
            };
            compare(&bench, &span, case.name, &mut random, setup, &mut seen);
        }
    }
    assert!(seen.escapes > 100, "{}", seen.escapes);
    assert!(seen.records > 2000, "{}", seen.records);
    assert!(seen.vetoed > 500, "{}", seen.vetoed);
}

#[test]
fn a_return_address_beyond_32_bits_is_pushed_whole() {
    // Nothing runs up there; the bytes must be those that two instructions have.
    let code = [0xe8, 0xfb, 0x0f, 0, 0];
    let at = Gva(0x1_2345_6780);
    let span = Span::find(&code, at, at).unwrap();
    let arena = Arena::new().unwrap();
    let detour = hvprobe_arch::detour::Recorder::new(&span, &quiet(&arena, 64), &[])
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
            },
        };
        let detour = Room::new(&arena).detour(&span, &ring, &[member]).unwrap();
        for boundary in boundaries {
            let at = arena.function().wrapping_add(*boundary);
            let rsp_is = stack_pointer(&mut random, &arena);
            let state = State::random(&mut random, rsp_is);
            let stack = vec![0x55; 0x20000];
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

/// Instructions of a kernel that only work on general registers and the stack, in runs that a jump
/// may displace.
fn tame(instruction: &Instruction) -> bool {
    use Mnemonic as M;
    const STACK: i64 = 0x800;
    let is_known = matches!(
        instruction.mnemonic(),
        M::Mov
            | M::Movzx
            | M::Movsx
            | M::Movsxd
            | M::Lea
            | M::Push
            | M::Pop
            | M::Add
            | M::Sub
            | M::And
            | M::Or
            | M::Xor
            | M::Cmp
            | M::Test
            | M::Inc
            | M::Dec
            | M::Neg
            | M::Not
            | M::Shl
            | M::Shr
            | M::Sar
            | M::Rol
            | M::Ror
            | M::Imul
            | M::Bt
            | M::Bts
            | M::Btr
            | M::Cmove
            | M::Cmovne
            | M::Cmovb
            | M::Cmovae
            | M::Cmovg
            | M::Cmovle
            | M::Sete
            | M::Setne
            | M::Xchg
            | M::Cdq
            | M::Cqo
            | M::Cdqe
            | M::Cwde
            | M::Nop
            | M::Bswap
            | M::Adc
            | M::Sbb
            | M::Cmc
            | M::Clc
            | M::Stc
    );
    let is_near = |displacement: u64| {
        let displacement = displacement.cast_signed();
        // What is below the stack pointer is anyone's: a barrier may read it.
        (0..STACK).contains(&displacement)
    };
    let operand = |index: u32| match instruction.op_kind(index) {
        OpKind::Register => instruction.op_register(index).is_gpr(),
        OpKind::Memory => {
            instruction.mnemonic() == M::Lea && instruction.memory_base() != Register::RIP
                || instruction.mnemonic() == M::Nop
                || instruction.memory_base() == Register::RSP
                    && instruction.memory_index() == Register::None
                    && instruction.segment_prefix() == Register::None
                    && !matches!(instruction.mnemonic(), M::Bt | M::Bts | M::Btr)
                    && is_near(instruction.memory_displacement64())
        }
        _ => true,
    };
    let moves_far = instruction.op_count() > 0
        && instruction.op0_kind() == OpKind::Register
        && instruction.op0_register().full_register() == Register::RSP
        && !matches!(instruction.mnemonic(), M::Push | M::Cmp | M::Test)
        && !(matches!(instruction.mnemonic(), M::Add | M::Sub)
            && is_near(instruction.immediate(1)));
    is_known && (0..instruction.op_count()).all(operand) && !moves_far
}

#[test]
fn instructions_of_a_kernel_do_what_they_do_in_place() {
    let Some(path) = stock_kernel() else {
        eprintln!("skipped: there is no stock kernel here (cargo lab setup)");
        return;
    };
    let text = Text::open(&path).unwrap();
    let mut random = Random::new(&[3]);
    let mut spans: Vec<Vec<u8>> = Vec::new();
    let mut run: Vec<Instruction> = Vec::new();
    text.for_each_in(
        |start| Random::new(&[start.0]).below(40) == 0,
        |site| {
            let follows = run.last().is_some_and(|last| last.next_ip() == site.at.0);
            if !follows || !tame(&site.instruction) {
                run.clear();
            }
            if tame(&site.instruction) {
                run.push(site.instruction);
            }
            let len: usize = run.iter().map(Instruction::len).sum();
            if len >= 5 {
                let first = run[0].ip();
                let code: Vec<u8> = run
                    .iter()
                    .flat_map(|one| text.code(Gva(one.ip()))[..one.len()].to_vec())
                    .collect();
                assert_eq!(first + len as u64, site.instruction.next_ip());
                spans.push(code);
                run.clear();
            }
        },
    );
    spans.sort();
    spans.dedup();
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let mut seen = Seen::default();
    let mut tried = 0;
    for code in &spans {
        arena.write(arena.function(), code);
        let end = arena.function().wrapping_add(code.len() as u64);
        let jump = assemble(&arena, end, |a| a.jmp(bench.exit(0).0));
        let whole = [&code[..], &jump].concat();
        let span = match Span::find(&whole, arena.function(), arena.function()) {
            Ok(span) => span,
            Err(Unfit::Refused { .. } | Unfit::Endbr { .. }) => continue,
            Err(unfit) => panic!("{code:02x?}: {unfit}"),
        };
        let unaligned = |state: &mut State, _: &mut [u8], _: &mut [u8]| {
            state.regs.rflags &= !rflags::AC;
        };
        for _ in 0..2 {
            compare(&bench, &span, "text", &mut random, unaligned, &mut seen);
        }
        tried += 1;
    }
    println!(
        "{tried} spans, {} records, {} escapes",
        seen.records, seen.escapes
    );
    assert!(tried > 1000, "{tried}");
}
