//! Tests copies of the stack. A detour copies the stack up to its last word, or takes the escape.

use super::compare::{Before, capture};
use super::{assemble, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Capture, Layout, Member, Part, STACK_MAX, Span};
use hvprobe_arch::regs::rflags;
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::Bench;
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::differential::random::Random;
use iced_x86::code_asm::{dword_ptr, registers::*};

const ROUNDS: u64 = 400;
/// Capacity of the ring: more cells than a record with a copy has, but few enough that records reach the end of the
/// ring.
const CELLS: u32 = 256;

/// Returns a distance in bytes from the stack pointer to the end of the stack. A stack of that length is usually
/// copied.
fn depth(random: &mut Random) -> u64 {
    let most = STACK_MAX as u64;
    match random.below(10) {
        0 => 8 * random.below(20),
        1 => random.pick(&[most - 8, most, most + 8, 16 << 10, 1 << 40, 0]),
        2 => 0_u64.wrapping_sub(8 * (1 + random.below(4096))),
        _ => 8 * (1 + random.below(most / 8)),
    }
}

#[test]
fn a_copy_has_the_stack_up_to_its_end_and_what_cannot_be_copied_takes_the_escape() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let code = assemble(&arena, arena.function(), |a| {
        a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
        a.jmp(bench.exit(0).0)
    });
    let span = Span::find(&code, arena.function(), arena.function()).unwrap();
    let ring = quiet(&arena, CELLS);
    let mut reader = Reader::new(&arena, ring);
    let mut random = Random::new(&[31]);
    let (mut copied, mut escaped) = (0, 0);
    for round in 0..ROUNDS {
        let mut captures = [(); 2].map(|()| Capture {
            stack: Vec::new(),
            ..capture(&mut random, &arena)
        });
        let one = usize::from(random.chance(50));
        captures[one].stack_copy = Some(arena.stack_fields());
        let members = captures.each_ref().map(|capture| Member {
            conditions: &[],
            vetoed: arena.counter(1),
            part: Part::Record {
                source: 5,
                capture,
                lost: arena.counter(0),
                waits: false,
            },
        });
        let detour = Room::new(&arena).detour(&span, &ring, &members).unwrap();
        let before = Before::random(&mut random, &arena);
        let (rsp_is, depth) = (before.state.regs.rsp, depth(&mut random));
        // The end is aligned, even if the stack pointer is not.
        let end = Gva((rsp_is & !7).wrapping_add(depth));
        arena.set_stack_end(end);
        let in_place = before.run(&bench);
        let planted = Planted::new(&arena, &span, &detour);
        let after = before.run(&bench);
        let what = format!(
            "round {round}: {rsp_is:#x} to {end}, {:?}",
            before.state.regs
        );
        after.is_as(&in_place, &before, &arena, &what);
        let deep = end.0.wrapping_sub(rsp_is);
        let escapes =
            before.state.regs.rflags & rflags::DF != 0 || !(1..=STACK_MAX as u64).contains(&deep);
        assert_eq!(planted.escapes(), u64::from(escapes), "{what}");
        if escapes {
            assert!(reader.next_record().unwrap().is_none(), "{what}");
            escaped += 1;
            continue;
        }
        for capture in &captures {
            let (_, bytes) = reader.next_record().unwrap().expect("a record");
            let layout = Layout::new(capture).unwrap();
            let record = layout.decode(&bytes).unwrap();
            before.check(&arena, capture, &record);
            let copy = layout.stack_copy(&bytes).unwrap();
            assert_eq!(copy.is_some(), capture.stack_copy.is_some());
            let Some(copy) = copy else { continue };
            let words = before.above(&arena);
            let first = Gva(rsp_is.next_multiple_of(8));
            let words = &words[usize::try_from(first.0 - rsp_is).unwrap()..];
            let count = usize::try_from((end.0 - first.0) / 8).unwrap();
            for (n, word) in words.as_chunks().0.iter().enumerate().take(count) {
                let at = first.wrapping_add(8 * n as u64);
                assert_eq!(
                    copy.word(at),
                    Some(u64::from_le_bytes(*word)),
                    "{at} {what}"
                );
            }
            let beyond = [
                end,
                end.wrapping_add(8),
                Gva(rsp_is.wrapping_sub(64)),
                Gva(0),
                Gva(!7),
            ];
            assert_eq!(beyond.map(|at| copy.word(at)), [None; 5], "{what}");
            copied += 1;
        }
    }
    assert!(
        copied > ROUNDS / 8 && escaped > ROUNDS / 8,
        "{copied} {escaped}"
    );
}
