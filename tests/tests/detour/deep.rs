//! Tests nested reads of memory: while a detour reads memory, the handler of a fault or of an interruption hits the
//! probe itself. At a certain depth, hits escape.

use super::edges::at_rdi;
use super::interrupts::{Counts, Interrupts};
use super::loads::cells;
use super::rings::{PATIENCE, Probed};
use super::world::{Found, PAGE, REAL_HALVES, ROW, found, world};
use super::{argument, assemble, give_way, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::detour::{Capture, Fetching, Layout, Member, Part, Record, Span};
use hvprobe_arch::fetch::{Base, Fetched, Memory, Pointer, Read};
use hvprobe_arch::regs::{Gpr, RegisterSet, Regs, rflags};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::loads::Loads;
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::detour::traps::{self, SignalStack};
use hvprobe_tests::differential::random::Random;
use iced_x86::code_asm::{dword_ptr, registers::*};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Returns an item that reads at a constant address.
fn at(address: u64, read: Read) -> Fetched {
    Fetched {
        base: Base::Constant(address),
        pointers: vec![Pointer {
            offset: 0,
            memory: Memory::Either,
        }],
        read,
    }
}

fn fetching(loads: &Loads<'_>, items: &[Fetched]) -> Option<Fetching> {
    Some(Fetching {
        readers: loads.readers(),
        items: items.to_vec(),
    })
}

/// Takes all finished records. Returns each of them with the results of its items.
fn drain(reader: &mut Reader<'_>, layout: &Layout, items: &[Fetched]) -> Vec<(Record, Vec<Found>)> {
    let next = || {
        let (_, bytes) = reader.next_record().unwrap()?;
        Some((layout.decode(&bytes).unwrap(), found(layout, &bytes, items)))
    };
    std::iter::from_fn(next).collect()
}

#[test]
fn the_escape_is_taken_before_anything_is_done() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let (kernel_half, process_end) = REAL_HALVES;
    let loads = Loads::new(&arena, kernel_half, process_end).unwrap();
    let code = assemble(&arena, arena.function(), |a| {
        a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
        a.jmp(bench.exit(0).0)
    });
    let span = Span::find(&code, arena.function(), arena.function()).unwrap();
    let never = Condition {
        register: Gpr::Rax,
        comparison: Comparison::Less,
        value: 0,
    };
    let reads = Capture {
        fetching: fetching(&loads, &[at(arena.data().start.0, Read::Text(30))]),
        ..argument()
    };
    let (lost, vetoed) = (arena.counter(0), arena.counter(1));
    let member = |conditions, capture| Member {
        conditions,
        vetoed,
        part: Part::Record {
            source: 5,
            capture,
            lost,
            waits: false,
        },
    };
    let plain = argument();
    let vetoes = [never];
    // Without the escape, the first member counts a veto, and all others record. The ring does not have room for
    // all of them.
    let mut members = vec![member(&vetoes[..], &plain), member(&[], &plain)];
    members.extend([member(&[], &reads); 20]);
    let ring = quiet(&arena, 32);
    let detour = Room::new(&arena).detour(&span, &ring, &members).unwrap();
    let escape = traps::know(detour.escape().unwrap(), bench.exit(2));
    let mut random = Random::new(&[21]);
    let word = |at: Gva| arena.word(at).load(Ordering::SeqCst);
    for ac in [0, rflags::AC] {
        for disabled in [0, 1, 2, 3, 4, i32::MAX, -1, i32::MIN] {
            let mut state = State::random(&mut random, arena.stack().start.wrapping_add(0x2000));
            state.regs.rflags = state.regs.rflags & !rflags::AC | ac;
            loads.set_disabled(disabled);
            let in_place = bench.run(arena.function(), &state);
            arena.write(span.at(), &detour.jump());
            let done = || {
                let counts = [ring.head, lost, vetoed].map(word);
                (
                    counts,
                    loads.calls(),
                    loads.disabled(),
                    cells(&arena, &ring),
                )
            };
            let (before, hits) = (done(), escape.hits());
            let left = bench.run(arena.function(), &state);
            assert_eq!(left.state, in_place.state, "{ac:x} {disabled}");
            arena.write(span.at(), span.bytes());
            let escapes = ac != 0 || !(0..=1).contains(&disabled);
            assert_eq!(
                escape.hits() - hits,
                u64::from(escapes),
                "{ac:x} {disabled}"
            );
            assert_eq!(left.exit, if escapes { 2 } else { 0 });
            assert_eq!(done() == before, escapes, "{ac:x} {disabled}");
        }
    }
    // Two runs did not escape. In each of them, every member but the first has written a record or counts as lost.
    let mut reader = Reader::new(&arena, ring);
    let records = std::iter::from_fn(|| reader.next_record().unwrap());
    assert_eq!(records.count() as u64 + word(lost), 2 * 21);
    assert_eq!(word(vetoed), 2);
}

#[test]
fn a_fault_whose_handler_runs_into_the_detour_ends_at_the_escape() {
    const CALLS: u64 = 20;
    /// Number of records of each call: one for the call itself, and one for the hit at each of its two faults. The
    /// hits at the faults of these nested hits escape.
    const RECORDS: u64 = 1 + 2;
    const ESCAPES: u64 = 4;
    /// First argument of the calls that the fault handler makes. All arguments are addresses at which no memory is
    /// mapped.
    const FROM_HANDLER: u64 = 1000;
    let _room = SignalStack::new().unwrap();
    let arena = Arena::new().unwrap();
    arena.enter();
    let (kernel_half, process_end) = REAL_HALVES;
    let loads = Loads::new(&arena, kernel_half, process_end).unwrap();
    let mut world = world(&arena, &loads, &mut Random::new(&[22]));
    let hole = world.page(ROW);
    world.put(hole - 30, b"The handler is called in here\0");
    world.put(hole - 400, b"all of this, not so short\0");
    let items = [
        at_rdi(Read::Bytes(8), Memory::Either),
        at(hole - 30, Read::Text(60)),
        at(hole - 400, Read::Bytes(23)),
    ];
    let capture = Capture {
        fetching: fetching(&loads, &items),
        ..argument()
    };
    let probed = Probed::new(&arena, quiet(&arena, 64), &capture);
    loads.call_at_faults(probed.function(), FROM_HANDLER);
    loads.set_disabled(0);
    let disabled = loads.disabled();
    let mut reader = probed.reader();
    let expected = [
        Found::Nothing,
        Found::Text {
            bytes: b"The handler is called in here".to_vec(),
            truncated: false,
        },
        Found::Bytes(b"all of this, not so sho".to_vec()),
    ];
    let mut arguments = HashSet::new();
    for call in 0..CALLS {
        probed.call(call..call + 1);
        assert_eq!(loads.disabled(), disabled);
        assert_eq!(probed.planted.escapes(), ESCAPES * (call + 1));
        let records = drain(&mut reader, &probed.layout, &items);
        assert_eq!(records.len() as u64, RECORDS);
        // The record of the interrupted call was begun first.
        assert_eq!(records[0].0.regs.rdi, call);
        for (record, found) in records {
            assert_eq!(found, expected);
            assert!(arguments.insert(record.regs.rdi), "{}", record.regs.rdi);
        }
    }
    assert_eq!(loads.faults().iter().flatten().sum::<u64>(), 6 * CALLS);
    assert_eq!(probed.lost(), 0);
}

#[test]
fn a_fixup_that_is_probed_itself_ends_at_the_escape() {
    let arena = Arena::new().unwrap();
    arena.enter();
    let (kernel_half, process_end) = REAL_HALVES;
    let code = assemble(&arena, arena.function(), |a| {
        a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
        Loads::fixup(a)
    });
    let loads = Loads::with_fixup(&arena, kernel_half, process_end, arena.function()).unwrap();
    let mut world = world(&arena, &loads, &mut Random::new(&[23]));
    let hole = world.page(ROW);
    world.put(hole - 12, b"eleven long\0");
    // Each item makes one load that faults, except the last item, which makes none.
    let items = [
        at(hole + 8, Read::Bytes(3)),
        at(hole - 12, Read::Text(9)),
        at(hole + 16, Read::Bytes(8)),
        at(hole - 12, Read::Text(40)),
        at(hole - 3000, Read::Bytes(40)),
    ];
    let expected: Vec<_> = items
        .iter()
        .map(|item| world.find(item, &Regs::default()).unwrap())
        .collect();
    let faults: u64 = world.faults.iter().flatten().sum();
    assert_eq!(faults, 4);
    let span = Span::find(&code, arena.function(), arena.function()).unwrap();
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rsp, Gpr::Rax]),
        fetching: fetching(&loads, &items),
        ..Capture::default()
    };
    let member = Member {
        conditions: &[],
        vetoed: arena.counter(1),
        part: Part::Record {
            source: 5,
            capture: &capture,
            lost: arena.counter(0),
            waits: false,
        },
    };
    let ring = quiet(&arena, 1024);
    let detour = Room::new(&arena).detour(&span, &ring, &[member]).unwrap();
    let planted = Planted::new(&arena, &span, &detour);
    let layout = Layout::new(&capture).unwrap();
    loads.set_disabled(0);
    let disabled = loads.disabled();
    let mut reader = Reader::new(&arena, ring);
    // SAFETY: the function follows the C calling convention, and its detour changes no register.
    let function: traps::Function = unsafe { std::mem::transmute(arena.code(arena.function())) };
    for call in 1..=5 {
        assert_eq!(function(0).cast_signed(), -14);
        assert_eq!(loads.disabled(), disabled);
        assert_eq!(planted.escapes(), faults.pow(2) * call);
        let records = drain(&mut reader, &layout, &items);
        let mut at_depth = HashMap::new();
        let top = records[0].0.regs.rsp;
        for (record, found) in records {
            assert_eq!(found, expected);
            let depth = top - record.regs.rsp;
            *at_depth.entry(depth).or_insert(0) += 1;
            // In a fixup, RAX still holds the address that the load accessed.
            let read = [8, 16, 0_u64.wrapping_sub(12), 0_u64.wrapping_sub(4)];
            let address = record.regs.rax.wrapping_sub(hole);
            assert!(depth == 0 || read.contains(&address), "{address:x}");
        }
        let mut at_depth: Vec<(u64, u64)> = at_depth.into_iter().collect();
        at_depth.sort_unstable();
        let counts: Vec<u64> = at_depth.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [1, faults]);
    }
    assert_eq!(arena.word(arena.counter(0)).load(Ordering::SeqCst), 0);
}

#[test]
fn reads_nest_wherever_they_are_interrupted() {
    const WANTED: u64 = 500;
    /// Length of the address range from which calls outside the handler take their arguments.
    const SOME: u64 = 4 * (ROW + 1) * PAGE;
    let arena = Arena::new().unwrap();
    let (kernel_half, process_end) = REAL_HALVES;
    let loads = Loads::new(&arena, kernel_half, process_end).unwrap();
    let mut random = Random::new(&[24]);
    let mut world = world(&arena, &loads, &mut random);
    let first = world.page(0);
    for _ in 0..2000 {
        world.put(first + random.below(SOME * 4), &[0]);
    }
    // The handler's arguments begin before an absent page. They may continue after the last page, where all memory
    // is zero.
    let others = world.page(5 * (ROW + 1) + ROW) - 0x400;
    assert!(others > first + SOME + 64);
    let behind = arena.pages().end;
    world.beside = vec![(behind, arena.read(behind, 2 << 20))];
    let hole = world.page(ROW);
    let to = world.page(1) + 0x123;
    world.put(hole - 20, &to.wrapping_sub(0x10).to_le_bytes());
    let chain = Fetched {
        base: Base::Constant(hole - 20),
        pointers: [0, 0x10]
            .map(|offset| Pointer {
                offset,
                memory: Memory::User,
            })
            .to_vec(),
        read: Read::Text(25),
    };
    let items = [
        at_rdi(Read::Bytes(15), Memory::Either),
        at_rdi(Read::Text(40), Memory::User),
        at(hole + 1, Read::Bytes(4)),
        chain,
        at_rdi(Read::Bytes(2), Memory::Kernel),
    ];
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rdi, Gpr::Rsi, Gpr::R8]),
        fetching: fetching(&loads, &items),
        ..Capture::default()
    };
    let ring = quiet(&arena, 1 << 14);
    let probed = Probed::new(&arena, ring, &capture);
    loads.set_disabled(0);
    let disabled = loads.disabled();
    let mut records = Vec::new();
    let (calls, counts) = std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            arena.enter();
            let began = Instant::now();
            let code = probed.detour.start..probed.detour.end;
            let interrupts = Interrupts::start(probed.function(), others, code).unwrap();
            let mut calls = 0;
            while interrupts.inside() < WANTED && began.elapsed() < PATIENCE {
                let at = first + calls / 64 * 997 % SOME;
                probed.call(at..at + 64);
                calls += 64;
                give_way(&arena, &ring);
            }
            let counts = interrupts.stop();
            (calls, counts)
        });
        let mut reader = probed.reader();
        loop {
            // Also true after a panic.
            let was_over = caller.is_finished();
            match reader.next_record().unwrap() {
                Some((_, bytes)) => records.push(bytes),
                None if was_over => break,
                None => std::thread::yield_now(),
            }
        }
        caller.join().unwrap()
    });
    let Counts { nested, inside } = counts;
    let lost = probed.lost();
    println!(
        "{calls} calls, {nested} nested, {inside} inside a detour, {lost} lost, {:?} faults",
        loads.faults()
    );
    assert!(
        inside >= WANTED,
        "interrupted inside a detour only {inside} times"
    );
    assert_eq!(records.len() as u64 + lost, calls + nested);
    let mut from_handler = 0;
    for bytes in &records {
        let regs = probed.layout.decode(bytes).unwrap().regs;
        from_handler += u64::from(regs.rdi >= others);
        let expected = items.iter().map(|item| world.find(item, &regs).unwrap());
        let found = found(&probed.layout, bytes, &items);
        assert_eq!(found, expected.collect::<Vec<_>>(), "at {:x}", regs.rdi);
    }
    println!("{} records, {from_handler} of them nested", records.len());
    assert!(from_handler > 0);
    assert_eq!(loads.disabled(), disabled);
    assert_eq!(probed.planted.escapes(), 0);
}
