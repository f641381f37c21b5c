//! Compares sequences of instructions from a stock kernel with their detours.

use super::assemble;
use super::compare::{Seen, compare};
use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Span, Unfit};
use hvprobe_arch::regs::rflags;
use hvprobe_fixtures::{is_short, rounds};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::differential::random::Random;
use hvprobe_tests::differential::text::{Text, stock_kernel};
use iced_x86::{Instruction, Mnemonic, OpKind, Register};

/// Returns whether the instruction can run in this process: it accesses only general registers and the stack.
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
        // Excludes memory below the stack pointer, whose content is undefined. Barriers access it
        // (`lock addl $0, -4(%rsp)`).
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
    let one_of = if is_short() { 160 } else { 40 };
    let mut random = Random::new(&[3]);
    let mut spans: Vec<Vec<u8>> = Vec::new();
    let mut run: Vec<Instruction> = Vec::new();
    text.for_each_in(
        |start| Random::new(&[start.0]).below(one_of) == 0,
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
    assert!(tried > rounds(1000), "{tried}");
}
