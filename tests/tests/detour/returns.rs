//! Tests return probes without exits. A probed function returns the same value with the same registers, and each
//! followed call has one record, with the data that was saved at its entry.

use super::followed::{
    LOST, MISSED, Returns, VETOED, counter, drain, everything, function, function_with, in_and_out,
    plant,
};
use super::interrupts::{Counts, Interrupts};
use super::{give_way, next, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::regs::{Gpr, rflags};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::differential::random::Random;
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, dword_ptr, qword_ptr, registers::*};
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Time limit of a wait in the tests.
const PATIENCE: Duration = Duration::from_secs(60);
type Build = fn(&mut CodeAssembler) -> Result<(), IcedError>;

#[test]
fn a_return_leaves_every_register_and_flag_as_the_function_did() {
    let bodies: [(Build, u64); 3] = [
        (|a| a.ret(), 8),
        (
            |a| {
                a.push(rbx)?;
                a.adc(rax, rdi)?;
                a.std()?;
                a.bswap(rdx)?;
                a.movq(xmm3, rdx)?;
                a.pop(rcx)?;
                a.ret()
            },
            8,
        ),
        (
            |a| {
                a.cmp(rsi, rdx)?;
                a.mov(rsi, rdi)?;
                a.ret_1(0x18)
            },
            0x20,
        ),
    ];
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let mut random = Random::new(&[4]);
    for (body, released) in bodies {
        let ring = quiet(&arena, 64);
        let mut room = Room::new(&arena);
        let returns = Returns::new(&mut room, &arena, &ring, 0, 3, everything(&arena));
        let span = function_with(&arena, body);
        let members = [returns.member()];
        let detour = room.detour(&span, &ring, &members).unwrap();
        let mut reader = Reader::new(&arena, ring);
        for generation in 1..=300 {
            let top = arena.stack().start.0 + 0x4000 + 8 * random.below(500);
            let mut state = State::random(&mut random, Gva(top));
            state.regs.rsp = top;
            let words: Vec<u64> = (0..8).map(|_| random.next()).collect();
            let run = || {
                for (index, word) in (0..).zip(&words) {
                    let at = Gva(top + 8 * index);
                    arena.word(at).store(*word, Ordering::SeqCst);
                }
                let exit = bench.exit(1).0;
                arena.word(Gva(top)).store(exit, Ordering::SeqCst);
                let left = bench.run(arena.function(), &state);
                let above = arena.read(Gva(top + released), 0x100);
                (left, above)
            };
            let planted = Planted::new(&arena, &span, &detour);
            let detoured = run();
            drop(planted);
            let in_place = run();
            assert!(
                in_place == detoured,
                "{state:x?}\n{:x?}\n{:x?}",
                in_place.0,
                detoured.0
            );
            let record = next(&mut reader, &returns.layout).expect("a record");
            let left = in_place.0.state.regs;
            assert_eq!(left.rsp, top + released);
            let mut regs = left;
            regs.rip = 0;
            assert_eq!(record.regs, regs);
            let call = record.call.unwrap();
            assert_eq!(call.return_address, bench.exit(1));
            let mut regs = state.regs;
            regs.rflags |= rflags::FIXED | rflags::IF;
            assert_eq!(call.regs, regs);
            assert_eq!(call.stack.as_slice(), [bench.exit(1).0, words[2]]);
            assert!(call.tsc < record.tsc);
            assert!(record.task.is_some() && record.cpu.is_some());
            // The free list is a stack, so every call gets the same instance.
            let first = u64::from(returns.first_stub) << 40;
            assert_eq!(call.id, 1 << 63 | first | generation);
            returns.check_idle();
        }
    }
}

/// Assembles `sum(n) = n + sum(n - 1)`, recursively.
fn sum(a: &mut CodeAssembler, function: Gva) -> Result<(), IcedError> {
    let mut end = a.create_label();
    a.xor(eax, eax)?;
    a.test(rdi, rdi)?;
    a.je(end)?;
    a.push(rdi)?;
    a.dec(rdi)?;
    a.call(function.0)?;
    a.pop(rdi)?;
    a.add(rax, rdi)?;
    a.set_label(&mut end)?;
    a.ret()
}

#[test]
fn recursion_beyond_the_instances_is_counted_as_missed() {
    const COUNT: u64 = 20;
    let arena = Arena::new().unwrap();
    arena.enter();
    let ring = quiet(&arena, 256);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 20, in_and_out());
    let members = [returns.member()];
    let at = arena.function();
    let _planted = plant(&arena, &mut room, &ring, &members, |a| sum(a, at));
    let mut reader = Reader::new(&arena, ring);
    let mut missed = 0;
    for depth in [0, 3, 19, 20, 50, 7] {
        assert_eq!(function(&arena)(depth), depth * (depth + 1) / 2);
        missed += (depth + 1).saturating_sub(COUNT);
        assert_eq!(counter(&arena, MISSED), missed);
        let records = drain(&mut reader, &returns.layout);
        // The innermost of the followed calls returns first.
        let taken = depth.saturating_sub(COUNT - 1)..=depth;
        let arguments: Vec<u64> = records.iter().map(|it| it.call.unwrap().regs.rdi).collect();
        assert_eq!(arguments, taken.clone().collect::<Vec<_>>());
        let results: Vec<u64> = records.iter().map(|it| it.regs.rax).collect();
        assert_eq!(results, taken.map(|n| n * (n + 1) / 2).collect::<Vec<_>>());
        returns.check_idle();
    }
    assert_eq!(counter(&arena, LOST), 0);
}

#[test]
fn the_cpu_at_entry_is_recorded_though_the_call_returns_on_another() {
    let arena = Arena::new().unwrap();
    arena.enter();
    let ring = quiet(&arena, 64);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 3, everything(&arena));
    let members = [returns.member()];
    let _planted = plant(&arena, &mut room, &ring, &members, |a| {
        a.inc(dword_ptr(u64::from(arena.cpu())).gs())?;
        a.ret()
    });
    let mut reader = Reader::new(&arena, ring);
    function(&arena)(0);
    let record = next(&mut reader, &returns.layout).unwrap();
    let entered = record.call.unwrap().cpu.unwrap();
    assert_eq!(record.cpu, Some(entered + 1));
}

#[test]
fn two_probes_of_one_function_return_one_through_the_other() {
    let arena = Arena::new().unwrap();
    arena.enter();
    let ring = quiet(&arena, 256);
    let mut room = Room::new(&arena);
    let first = Returns::new(&mut room, &arena, &ring, 0, 30, in_and_out());
    let mut second = Returns::new(&mut room, &arena, &ring, 1, 30, in_and_out());
    // The second probe's condition accepts only odd arguments.
    second.conditions = vec![Condition {
        register: Gpr::Rdi,
        comparison: Comparison::AnyBit,
        value: 1,
    }];
    let members = [first.member(), second.member()];
    let at = arena.function();
    let _planted = plant(&arena, &mut room, &ring, &members, |a| sum(a, at));
    let mut reader = Reader::new(&arena, ring);
    assert_eq!(function(&arena)(9), 45);
    let records = drain(&mut reader, &first.layout);
    let seen: Vec<(u32, u64)> = records
        .iter()
        .map(|it| (it.source, it.call.unwrap().regs.rdi))
        .collect();
    let expected: Vec<(u32, u64)> = (0..10)
        .flat_map(|n| [(1, n), (0, n)])
        .filter(|(source, n)| *source == 0 || n % 2 == 1)
        .collect();
    assert_eq!(seen, expected);
    assert_eq!(counter(&arena, VETOED), 5);
    for pair in records.windows(2) {
        if let [inner, outer] = pair
            && inner.source == 1
        {
            let (inner, outer) = (inner.call.unwrap(), outer.call.unwrap());
            // Both records have the caller's address, even if the first probe's instance belongs to another call
            // when they are read.
            assert_eq!(inner.return_address, outer.return_address);
        }
    }
    first.check_idle();
    second.check_idle();
}

#[test]
fn returns_are_taken_when_the_ring_is_full_and_their_records_lost() {
    let arena = Arena::new().unwrap();
    arena.enter();
    let ring = quiet(&arena, 32);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 2, in_and_out());
    let at = arena.function();
    let members = [returns.member()];
    let _planted = plant(&arena, &mut room, &ring, &members, |a| sum(a, at));
    let fits = 32 / u64::from(returns.layout.cells());
    for _ in 0..fits + 9 {
        assert_eq!(function(&arena)(0), 0);
    }
    assert_eq!(counter(&arena, LOST), 9);
    let mut reader = Reader::new(&arena, ring);
    assert_eq!(drain(&mut reader, &returns.layout).len() as u64, fits);
    returns.check_idle();
}

#[test]
fn calls_of_several_threads_keep_what_is_theirs() {
    const THREADS: u64 = 3;
    const WANTED: u64 = 100_000;
    let arena = Arena::new().unwrap();
    let ring = quiet(&arena, 1024);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 10, in_and_out());
    let members = [returns.member()];
    let at = arena.function();
    let _planted = plant(&arena, &mut room, &ring, &members, |a| sum(a, at));
    let is_enough = AtomicBool::new(false);
    let mut arrived = 0;
    let mut ids = HashSet::new();
    std::thread::scope(|scope| {
        let (arena, ring, is_enough) = (&arena, &ring, &is_enough);
        let callers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    arena.enter();
                    let mut random = Random::new(&[5, thread]);
                    let mut calls = 0;
                    while !is_enough.load(Ordering::SeqCst) {
                        let depth = random.below(14);
                        calls += depth + 1;
                        assert_eq!(function(arena)(depth), depth * (depth + 1) / 2);
                        give_way(arena, ring);
                    }
                    calls
                })
            })
            .collect();
        let began = Instant::now();
        let mut reader = Reader::new(arena, *ring);
        loop {
            let is_over = callers.iter().all(|caller| caller.is_finished());
            let records = drain(&mut reader, &returns.layout);
            for record in &records {
                let call = record.call.unwrap();
                let n = call.regs.rdi;
                assert_eq!(record.regs.rax, n * (n + 1) / 2);
                assert!(ids.insert(call.id), "{:#x} twice", call.id);
            }
            arrived += records.len() as u64;
            if arrived >= WANTED || began.elapsed() > PATIENCE {
                is_enough.store(true, Ordering::SeqCst);
            }
            if records.is_empty() {
                if is_over {
                    break;
                }
                std::thread::yield_now();
            }
        }
        let calls: u64 = callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .sum();
        let (lost, missed) = (counter(arena, LOST), counter(arena, MISSED));
        println!("{calls} calls: {arrived} arrived, {lost} lost, {missed} missed");
        assert_eq!(arrived + lost + missed, calls);
        assert!(missed > 0 && arrived >= WANTED);
    });
    returns.check_idle();
}

#[test]
fn calls_and_returns_nest_wherever_they_are_interrupted() {
    const THREADS: u64 = 2;
    const WANTED: u64 = 300;
    let arena = Arena::new().unwrap();
    let ring = quiet(&arena, 4096);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 40, in_and_out());
    let members = [returns.member()];
    let at = arena.function();
    let _planted = plant(&arena, &mut room, &ring, &members, |a| {
        a.lea(rax, qword_ptr(rdi + rdi * 2))?;
        a.ret()
    });
    let code = returns.stubs.0..arena.detours().end.0;
    assert!(!code.contains(&at.0));
    let mut ids = HashSet::new();
    let mut arrived = 0;
    std::thread::scope(|scope| {
        let (arena, ring, code) = (&arena, &ring, &code);
        let callers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    arena.enter();
                    let function = function(arena);
                    let began = Instant::now();
                    let interrupts = Interrupts::start(function, 1 << 32, code.clone()).unwrap();
                    let mut calls = 0;
                    while interrupts.inside() < WANTED && began.elapsed() < PATIENCE {
                        for _ in 0..50 {
                            let value = thread << 40 | calls;
                            assert_eq!(function(value), 3 * value);
                            calls += 1;
                        }
                        give_way(arena, ring);
                    }
                    let Counts { nested, inside } = interrupts.stop();
                    assert!(
                        inside >= WANTED,
                        "interrupted in the code only {inside} times"
                    );
                    calls + nested
                })
            })
            .collect();
        let mut reader = Reader::new(arena, *ring);
        loop {
            let is_over = callers.iter().all(|caller| caller.is_finished());
            let records = drain(&mut reader, &returns.layout);
            for record in &records {
                let call = record.call.unwrap();
                assert_eq!(record.regs.rax, 3 * call.regs.rdi);
                assert!(ids.insert(call.id), "{:#x} twice", call.id);
            }
            arrived += records.len() as u64;
            if records.is_empty() {
                if is_over {
                    break;
                }
                std::thread::yield_now();
            }
        }
        let calls: u64 = callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .sum();
        let (lost, missed) = (counter(arena, LOST), counter(arena, MISSED));
        println!("{calls} calls: {arrived} arrived, {lost} lost, {missed} missed");
        assert_eq!(arrived + lost + missed, calls);
    });
    returns.check_idle();
}

thread_local! {
    /// Channels to report that the call is in flight, and to wait until it may return.
    static GATE: RefCell<Option<(mpsc::Sender<u64>, mpsc::Receiver<u64>)>> =
        const { RefCell::new(None) };
}

extern "C" fn wait(thread: u64) -> u64 {
    GATE.with_borrow(|gate| {
        let (here, may_go) = gate.as_ref().expect("a gate");
        here.send(thread).expect("a listener");
        may_go.recv_timeout(PATIENCE).expect("a result")
    })
}

#[test]
fn calls_return_in_any_order() {
    const THREADS: usize = 8;
    let arena = Arena::new().unwrap();
    let ring = quiet(&arena, 256);
    let mut room = Room::new(&arena);
    let returns = Returns::new(&mut room, &arena, &ring, 0, 8, in_and_out());
    let members = [returns.member()];
    let wait_at = (wait as *const ()).expose_provenance() as u64;
    let _planted = plant(&arena, &mut room, &ring, &members, |a| {
        a.sub(rsp, 8)?;
        a.mov(rax, wait_at)?;
        a.call(rax)?;
        a.add(rsp, 8)?;
        a.ret()
    });
    let mut reader = Reader::new(&arena, ring);
    let mut order: Vec<usize> = (0..THREADS).collect();
    let mut random = Random::new(&[6]);
    for index in (1..THREADS).rev() {
        let other = usize::try_from(random.below(index as u64 + 1)).unwrap();
        order.swap(index, other);
    }
    std::thread::scope(|scope| {
        let (here, arrivals) = mpsc::channel();
        let mut threads: Vec<_> = (0..THREADS as u64)
            .map(|thread| {
                let (go, may_go) = mpsc::channel();
                let here = here.clone();
                let arena = &arena;
                let caller = scope.spawn(move || {
                    arena.enter();
                    GATE.set(Some((here, may_go)));
                    function(arena)(thread)
                });
                assert_eq!(arrivals.recv_timeout(PATIENCE), Ok(thread));
                (go, Some(caller))
            })
            .collect();
        assert_eq!(drain(&mut reader, &returns.layout), []);
        for index in order {
            let (go, caller) = &mut threads[index];
            let result = 100 + index as u64;
            go.send(result).unwrap();
            assert_eq!(caller.take().unwrap().join().unwrap(), result);
            let records = drain(&mut reader, &returns.layout);
            let [record] = records[..] else {
                panic!("{records:?}")
            };
            assert_eq!(record.regs.rax, result);
            assert_eq!(record.call.unwrap().regs.rdi, index as u64);
        }
    });
    assert_eq!(counter(&arena, MISSED), 0);
    returns.check_idle();
}
