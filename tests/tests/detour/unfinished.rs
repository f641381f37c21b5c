//! Tests that the reader finds the records after an unfinished one. The writer of the unfinished record has stopped
//! at any instruction of the detour. Registers and stack words look like marks of records.

use super::{assemble, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Capture, Layout, Member, Part, Span};
use hvprobe_arch::regs::{Gpr, RegisterSet, Regs};
use hvprobe_arch::trap::INT3;
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::detour::traps;
use iced_x86::code_asm::{dword_ptr, registers::*};
use iced_x86::{Decoder, DecoderOptions};
use std::sync::atomic::Ordering;

/// Exit of the bench: a call has stopped at an int3.
const STANDS: u64 = 0;
/// Exit of the bench: a call has finished.
const THROUGH: u64 = 1;
const SOURCE: u32 = 5;
/// Number of the call that stops. The calls with lower numbers are made meanwhile.
const LAST: u64 = 3;

/// Returns the state of a call that has a stack of its own. Its registers and stack words look like the mark of a
/// record that begins a few cells after `position`.
fn registers(arena: &Arena, call: u64, position: u64) -> State {
    let mut state = State {
        regs: Regs::default(),
        vectors: [[0; 4]; 16],
    };
    let mark = u64::from(SOURCE | 1 << 24) << 32;
    let stack = arena.stack().start.wrapping_add(0x1000 * (call + 1));
    for (register, cell) in Gpr::ALL.into_iter().zip(1..) {
        let value = mark | ((position + cell) & 0xffff_ffff);
        state.regs.set(register, value);
        let word = arena.word(stack.wrapping_add(8 * (cell - 1)));
        word.store(value, Ordering::SeqCst);
    }
    state.regs.rsp = stack.0;
    state.regs.set(Gpr::Rdi, mark | call);
    state
}

#[test]
fn records_are_found_behind_one_that_stops_at_any_instruction() {
    traps::install();
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    // A record has six cells, and the ring's capacity is no multiple of six, so some records extend past the end of
    // the ring.
    let ring = quiet(&arena, 64);
    let capture = Capture {
        registers: RegisterSet::default(),
        stack: (0..16).collect(),
        task: Some(arena.task()),
        cpu: Some(arena.cpu()),
        fetching: None,
        stack_copy: None,
    };
    let layout = Layout::new(&capture).unwrap();
    assert_eq!(layout.cells(), 6);
    let through = bench.exit(THROUGH);
    let code = assemble(&arena, arena.function(), |a| {
        a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
        a.jmp(through.0)
    });
    let span = Span::find(&code, arena.function(), arena.function()).unwrap();
    let lost = arena.counter(0);
    let member = Member {
        conditions: &[],
        vetoed: arena.counter(1),
        part: Part::Record {
            source: SOURCE,
            capture: &capture,
            lost,
            waits: false,
        },
    };
    let detour = Room::new(&arena).detour(&span, &ring, &[member]).unwrap();
    let planted = Planted::new(&arena, &span, &detour);
    let mut reader = Reader::new(&arena, ring);
    let head = || arena.word(ring.head).load(Ordering::SeqCst);
    let call = |number: u64| registers(&arena, number, head());
    let calls = |reader: &Reader<'_>| -> Vec<u64> {
        let finished = reader.finished().into_iter();
        let records = finished.map(|(header, bytes)| {
            assert_eq!((header.source, header.cells), (SOURCE, 6));
            layout.decode(&bytes).unwrap()
        });
        records.map(|it| it.regs.rdi & 0xffff_ffff).collect()
    };

    let bytes = arena.read(detour.at(), detour.code().len());
    let decoder = Decoder::with_ip(64, &bytes, detour.at().0, DecoderOptions::NONE);
    let inside = decoder.into_iter().map(|it| it.ip());
    let inside = inside.take_while(|ip| *ip < detour.tail().0);
    let mut stood = [0; 3];
    for stop in inside.map(Gva) {
        let before = head();
        let original = arena.read(stop, 1);
        arena.write(stop, &[INT3]);
        let known = traps::know(stop, bench.exit(STANDS));
        let left = bench.run(arena.function(), &call(LAST));
        drop(known);
        arena.write(stop, &original);
        assert_eq!(left.exit, STANDS, "at {stop}");
        let has_begun = head() != before;
        for other in 0..LAST {
            let left = bench.run(arena.function(), &call(other));
            assert_eq!(left.exit, THROUGH);
        }
        let found = calls(&reader);
        let is_finished = found.contains(&LAST);
        match is_finished {
            false => assert_eq!(found, [0, 1, 2], "at {stop}"),
            true => assert_eq!(found, [LAST, 0, 1, 2], "at {stop}"),
        }
        stood[usize::from(has_begun) + usize::from(is_finished)] += 1;
        let left = bench.run(stop, &left.state);
        assert_eq!(left.exit, THROUGH);
        let found = calls(&reader);
        let all: &[u64] = if has_begun {
            &[LAST, 0, 1, 2]
        } else {
            &[0, 1, 2, LAST]
        };
        assert_eq!(found, all, "at {stop}");
        for number in all {
            let (_, bytes) = reader.next_record().unwrap().unwrap();
            let record = layout.decode(&bytes).unwrap();
            assert_eq!(record.regs.rdi & 0xffff_ffff, *number);
            let words: Vec<u64> = Gpr::ALL
                .into_iter()
                .filter(|it| !matches!(it, Gpr::Rdi | Gpr::Rsp))
                .map(|it| record.regs.get(it))
                .collect();
            assert!(words.is_sorted(), "{words:x?}");
            assert_eq!(words[0] >> 32, u64::from(SOURCE | 1 << 24));
        }
        assert!(reader.next_record().unwrap().is_none());
    }
    drop(planted);
    assert_eq!(arena.word(lost).load(Ordering::SeqCst), 0);
    println!("stood before, in and after the record: {stood:?}");
    assert!(stood[0] > 5 && stood[1] > 40 && stood[2] > 5, "{stood:?}");
}
