//! Tests threads that are preempted at any instruction of a detour, or of the code to which a followed call
//! returns, and continue on another CPU. The time stamp counters of two CPUs may differ, so the time and the CPU
//! number that are recorded together must be those of one CPU.

use super::followed::{LOST, Returns, VETOED, drain, everything, function_with};
use super::stops::{instructions, run_until};
use super::{next, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Capture, Layout, Member, Part, STUB};
use hvprobe_arch::regs::Regs;
use hvprobe_arch::trap::ROOM_PORT;
use hvprobe_tests::detour::arena::{Arena, CPU};
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use iced_x86::{Instruction, Mnemonic};

/// Exit of the bench: the thread has stopped at an int3.
const STANDS: u64 = 0;
/// Exit of the bench: the call has returned.
const RETURNED: u64 = 1;
/// Exit of the bench: the thread is inside the function.
const INSIDE: u64 = 2;
/// CPU on which a thread continues after its migration.
const OTHER: u32 = CPU + 1;

/// Returns this processor's time stamp counter.
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and Linux lets user mode execute it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

fn set_cpu(arena: &Arena, cpu: u32) {
    let at = arena.gs().wrapping_add(u64::from(arena.cpu()));
    arena.write(at, &cpu.to_le_bytes());
}

/// A time and a CPU that were recorded together.
type Recorded = (u64, Option<u32>);

/// Runs the code at `at` once for each instruction in `code`, and makes the thread migrate at that instruction.
/// `prepare` returns the state in which a run begins. `recorded` gets the exit of a run, and returns all times and
/// CPUs that the run recorded.
fn migrate_everywhere(
    bench: &Bench<'_>,
    at: impl Fn() -> Gva,
    code: &[Instruction],
    mut prepare: impl FnMut() -> State,
    mut recorded: impl FnMut(u64) -> Vec<Recorded>,
) {
    let (mut before, mut after) = (0, 0);
    for instruction in code {
        let stop = Gva(instruction.ip());
        let state = prepare();
        set_cpu(bench.arena(), CPU);
        let left = run_until(bench, at(), &state, stop, STANDS);
        if left.exit != STANDS {
            // The run did not reach this instruction: a run does not execute every instruction.
            recorded(left.exit);
            continue;
        }
        let migrated = counter();
        set_cpu(bench.arena(), OTHER);
        let left = bench.run(stop, &left.state);
        for (number, (tsc, cpu)) in recorded(left.exit).into_iter().enumerate() {
            let expected = if tsc < migrated { CPU } else { OTHER };
            assert_eq!(cpu, Some(expected), "{number}: migrated at {instruction}");
            match expected {
                CPU => before += 1,
                _ => after += 1,
            }
        }
    }
    assert!(before > 10 && after > 5, "{before}, {after}");
}

fn registers(rsp: Gva) -> State {
    State {
        regs: Regs {
            rsp: rsp.0,
            ..Regs::default()
        },
        vectors: [[0; 4]; 16],
    }
}

/// Returns a member that records `capture` at each hit.
fn record<'c>(arena: &Arena, source: u32, capture: &'c Capture, waits: bool) -> Member<'c> {
    Member {
        conditions: &[],
        vetoed: arena.counter(VETOED),
        part: Part::Record {
            source,
            capture,
            lost: arena.counter(LOST),
            waits,
        },
    }
}

#[test]
fn a_hit_has_the_time_and_the_number_of_one_cpu() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let ring = quiet(&arena, 64);
    let capture = Capture {
        cpu: Some(arena.cpu()),
        ..Capture::default()
    };
    let member = record(&arena, 0, &capture, false);
    let inside = bench.exit(INSIDE);
    let span = function_with(&arena, |a| a.jmp(inside.0));
    let detour = Room::new(&arena).detour(&span, &ring, &[member]).unwrap();
    let _planted = Planted::new(&arena, &span, &detour);
    let layout = Layout::new(&capture).unwrap();
    let mut reader = Reader::new(&arena, ring);

    let tail = detour.tail();
    let code = instructions(&arena, detour.at(), |it| it.ip() < tail.0);
    let slot = arena.stack().start.wrapping_add(0x1000);
    migrate_everywhere(
        &bench,
        || arena.function(),
        &code,
        || registers(slot),
        |exit| {
            assert_eq!(exit, INSIDE);
            let records = drain(&mut reader, &layout);
            assert_eq!(records.len(), 1);
            vec![(records[0].tsc, records[0].cpu)]
        },
    );
}

#[test]
fn a_call_has_the_time_and_the_number_of_one_cpu_at_its_entry_and_at_its_return() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let ring = quiet(&arena, 64);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 1, everything(&arena));
    let inside = bench.exit(INSIDE);
    let span = function_with(&arena, |a| a.jmp(inside.0));
    let detour = room.detour(&span, &ring, &[returns.member()]).unwrap();
    let _planted = Planted::new(&arena, &span, &detour);
    let mut reader = Reader::new(&arena, ring);

    let slot = arena.stack().start.wrapping_add(0x1000);
    let made = || {
        arena.write(slot, &bench.exit(RETURNED).0.to_le_bytes());
        registers(slot)
    };
    let done = registers(slot.wrapping_add(8));
    let stub = returns.stubs;
    let tail = detour.tail();
    let entering = instructions(&arena, detour.at(), |it| it.ip() < tail.0);
    migrate_everywhere(
        &bench,
        || arena.function(),
        &entering,
        made,
        |exit| {
            assert_eq!(exit, INSIDE);
            assert_eq!(bench.run(stub, &done).exit, RETURNED);
            let records = drain(&mut reader, &returns.layout);
            let call = records[0].call.unwrap();
            vec![(call.tsc, call.cpu)]
        },
    );

    // After the only stub comes the code that stubs share.
    let common = stub.wrapping_add(u64::from(STUB));
    let leaving = instructions(&arena, common, |it| it.mnemonic() != Mnemonic::Ret);
    migrate_everywhere(
        &bench,
        || stub,
        &leaving,
        || {
            assert_eq!(bench.run(arena.function(), &made()).exit, INSIDE);
            done.clone()
        },
        |exit| {
            assert_eq!(exit, RETURNED);
            let records = drain(&mut reader, &returns.layout);
            vec![(records[0].tsc, records[0].cpu)]
        },
    );
    returns.check_idle();
}

#[test]
fn each_member_of_a_detour_has_the_time_and_the_number_of_one_cpu() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let ring = quiet(&arena, 256);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 1, everything(&arena));
    let with_task = Capture {
        task: Some(arena.task()),
        cpu: Some(arena.cpu()),
        ..Capture::default()
    };
    let with_stack = Capture {
        cpu: Some(arena.cpu()),
        stack_copy: Some(arena.stack_fields()),
        ..Capture::default()
    };
    let members = [
        record(&arena, 1, &with_stack, false),
        returns.member(),
        record(&arena, 2, &with_task, false),
        record(&arena, 3, &with_stack, false),
    ];
    let inside = bench.exit(INSIDE);
    let span = function_with(&arena, |a| a.jmp(inside.0));
    let detour = room.detour(&span, &ring, &members).unwrap();
    let planted = Planted::new(&arena, &span, &detour);
    let layouts = [&with_stack, &with_task, &with_stack].map(|it| Layout::new(it).unwrap());
    let mut reader = Reader::new(&arena, ring);

    let slot = arena.stack().start.wrapping_add(0x1000);
    arena.set_stack_end(slot.wrapping_add(64));
    let done = registers(slot.wrapping_add(8));
    let tail = detour.tail();
    let code = instructions(&arena, detour.at(), |it| it.ip() < tail.0);
    migrate_everywhere(
        &bench,
        || arena.function(),
        &code,
        || {
            arena.write(slot, &bench.exit(RETURNED).0.to_le_bytes());
            registers(slot)
        },
        |exit| {
            assert_eq!(exit, INSIDE);
            let mut recorded: Vec<Recorded> = layouts
                .iter()
                .map(|layout| next(&mut reader, layout).expect("a record"))
                .map(|record| (record.tsc, record.cpu))
                .collect();
            assert_eq!(bench.run(returns.stubs, &done).exit, RETURNED);
            let records = drain(&mut reader, &returns.layout);
            let call = records[0].call.unwrap();
            recorded.push((call.tsc, call.cpu));
            recorded
        },
    );
    assert_eq!(planted.escapes(), 0);
}

#[test]
fn a_hit_that_waits_for_room_keeps_the_time_and_the_cpu_of_its_arrival() {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let ring = quiet(&arena, 64);
    let capture = Capture {
        cpu: Some(arena.cpu()),
        ..Capture::default()
    };
    let member = record(&arena, 0, &capture, true);
    let inside = bench.exit(INSIDE);
    let span = function_with(&arena, |a| a.jmp(inside.0));
    let detour = Room::new(&arena).detour(&span, &ring, &[member]).unwrap();
    let _planted = Planted::new(&arena, &span, &detour);
    let layout = Layout::new(&capture).unwrap();
    let mut reader = Reader::new(&arena, ring);
    let end = detour.at().0 + detour.code().len() as u64;
    let code = instructions(&arena, detour.at(), |it| it.ip() < end);
    let asks = |it: &&Instruction| it.mnemonic() == Mnemonic::Out && it.immediate8() == ROOM_PORT;
    let asks = Gva(code.iter().find(asks).expect("it asks").ip());

    let state = registers(arena.stack().start.wrapping_add(0x1000));
    set_cpu(&arena, CPU);
    let mut hits = 0;
    let mut waiting = loop {
        let left = run_until(&bench, arena.function(), &state, asks, STANDS);
        if left.exit == STANDS {
            break left.state;
        }
        hits += 1;
        assert!(hits <= 64, "the ring is never full");
    };
    let asked = counter();
    set_cpu(&arena, OTHER);
    assert_eq!(drain(&mut reader, &layout).len(), hits);
    // AL says that there is room.
    waiting.regs.rax = waiting.regs.rax & !0xff | 1;
    let left = bench.run(asks.wrapping_add(2), &waiting);
    assert_eq!(left.exit, INSIDE);
    let records = drain(&mut reader, &layout);
    assert_eq!(records.len(), 1);
    assert!(records[0].tsc < asked);
    assert_eq!(records[0].cpu, Some(CPU));
}
