//! Tests the ring under pressure: full, above its watermark, with several writers, and with a writer that is
//! interrupted by another one on the same thread, as by an NMI.

use super::interrupts::{Counts, Function, Interrupts};
use super::{argument, assemble, give_way, next, quiet};
use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Capture, Layout, Member, Part, Ring, Span};
use hvprobe_arch::regs::{Gpr, RegisterSet};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::detour::traps;
use iced_x86::code_asm::{dword_ptr, qword_ptr, registers::*};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time limit of a wait in the tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A probed function that adds one to its argument.
pub(crate) struct Probed<'a> {
    arena: &'a Arena,
    ring: Ring,
    pub(crate) layout: Layout,
    lost: Gva,
    pub(crate) detour: Range<u64>,
    pub(crate) planted: Planted<'a>,
}

impl<'a> Probed<'a> {
    pub(crate) fn new(arena: &'a Arena, ring: Ring, capture: &Capture) -> Self {
        let code = assemble(arena, arena.function(), |a| {
            a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
            a.lea(rax, qword_ptr(rdi + 1))?;
            a.ret()
        });
        let span = Span::find(&code, arena.function(), arena.function()).unwrap();
        let lost = arena.counter(0);
        let member = Member {
            conditions: &[],
            vetoed: arena.counter(1),
            part: Part::Record {
                source: 5,
                capture,
                lost,
                waits: false,
            },
        };
        let detour = Room::new(arena).detour(&span, &ring, &[member]).unwrap();
        Self {
            arena,
            ring,
            layout: Layout::new(capture).unwrap(),
            lost,
            detour: detour.at().0..detour.at().0 + detour.code().len() as u64,
            planted: Planted::new(arena, &span, &detour),
        }
    }

    pub(crate) fn function(&self) -> Function {
        let code = self.arena.code(self.arena.function());
        // SAFETY: the function above follows the C calling convention, and so does its detour, which changes no
        // register.
        unsafe { std::mem::transmute(code) }
    }

    pub(crate) fn call(&self, values: Range<u64>) {
        let function = self.function();
        for value in values {
            assert_eq!(function(value), value + 1);
        }
    }

    pub(crate) fn lost(&self) -> u64 {
        self.arena.word(self.lost).load(Ordering::SeqCst)
    }

    pub(crate) fn reader(&self) -> Reader<'a> {
        Reader::new(self.arena, self.ring)
    }

    /// Takes all finished records and returns their arguments.
    fn drain(&self, reader: &mut Reader<'_>) -> Vec<u64> {
        std::iter::from_fn(|| next(reader, &self.layout))
            .map(|record| record.regs.rdi)
            .collect()
    }
}

#[test]
fn a_full_ring_loses_what_does_not_fit_and_keeps_what_is_there() {
    let arena = Arena::new().unwrap();
    // A record has three cells, and the ring's capacity is no multiple of three, so records extend past the end of
    // the ring.
    let capture = Capture {
        registers: RegisterSet::default(),
        ..Capture::default()
    };
    let probed = Probed::new(&arena, quiet(&arena, 32), &capture);
    assert_eq!(probed.layout.cells(), 3);
    let mut reader = probed.reader();
    let mut lost = 0;
    for round in 0..100 {
        let first = round * 1000;
        probed.call(first..first + 15);
        lost += 5;
        assert_eq!(probed.lost(), lost, "round {round}");
        let kept: Vec<u64> = (first..first + 10).collect();
        assert_eq!(probed.drain(&mut reader), kept);
    }
}

#[test]
fn the_doorbell_rings_once_each_time_the_watermark_is_passed() {
    const PORT: u8 = 0x42;
    traps::install();
    let arena = Arena::new().unwrap();
    let probed = Probed::new(&arena, arena.ring(64, 40, PORT), &argument());
    assert_eq!(probed.layout.cells(), 1);
    let mut reader = probed.reader();
    for round in 0..5 {
        probed.call(0..39);
        assert_eq!(traps::doorbells(PORT), round);
        probed.call(39..40);
        assert_eq!(traps::doorbells(PORT), round + 1);
        probed.call(40..90);
        assert_eq!(traps::doorbells(PORT), round + 1);
        assert_eq!(probed.drain(&mut reader).len(), 64);
    }
}

#[test]
fn records_of_several_threads_arrive_once_each_and_in_their_order() {
    const THREADS: u64 = 3;
    const WANTED: u64 = 200_000;
    let arena = Arena::new().unwrap();
    let probed = Probed::new(&arena, quiet(&arena, 256), &argument());
    let is_enough = AtomicBool::new(false);
    let mut last = vec![None; usize::try_from(THREADS).unwrap()];
    let mut arrived = 0;
    let calls: u64 = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (probed, is_enough) = (&probed, &is_enough);
                scope.spawn(move || {
                    probed.arena.enter();
                    let first = thread << 32;
                    let mut calls = 0;
                    while !is_enough.load(Ordering::SeqCst) {
                        probed.call(first + calls..first + calls + 50);
                        calls += 50;
                        give_way(probed.arena, &probed.ring);
                    }
                    calls
                })
            })
            .collect();
        let began = Instant::now();
        let mut reader = probed.reader();
        loop {
            let is_over = callers.iter().all(|caller| caller.is_finished());
            let values = probed.drain(&mut reader);
            for value in &values {
                let (thread, number) = (usize::try_from(value >> 32).unwrap(), Some(*value));
                assert!(last[thread] < number, "{value:#x} after {last:x?}");
                last[thread] = number;
                arrived += 1;
            }
            if arrived >= WANTED || began.elapsed() > PATIENCE {
                is_enough.store(true, Ordering::SeqCst);
            }
            if values.is_empty() {
                if is_over {
                    break;
                }
                std::thread::yield_now();
            }
        }
        callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .sum()
    });
    println!("{calls} calls: {arrived} arrived, {} lost", probed.lost());
    assert_eq!(arrived + probed.lost(), calls);
    assert!(arrived >= WANTED, "{arrived}");
}

#[test]
fn detours_nest_wherever_they_are_interrupted() {
    const WANTED: u64 = 500;
    /// First argument of the handler's calls.
    const FROM_HANDLER: u64 = 1 << 40;
    let arena = Arena::new().unwrap();
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rdi, Gpr::Rsp, Gpr::Rax]),
        task: Some(arena.task()),
        ..Capture::default()
    };
    // Every record rings the doorbell, even those of the handler, which is the worst case.
    traps::install();
    let probed = Probed::new(&arena, arena.ring(1024, 1, 0), &capture);
    let mut seen = HashSet::new();
    let (calls, counts) = std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            arena.enter();
            let began = Instant::now();
            let code = probed.detour.clone();
            let interrupts = Interrupts::start(probed.function(), FROM_HANDLER, code).unwrap();
            let mut calls = 0;
            while interrupts.inside() < WANTED && began.elapsed() < PATIENCE {
                probed.call(calls..calls + 100);
                calls += 100;
                give_way(&arena, &probed.ring);
            }
            let counts = interrupts.stop();
            (calls, counts)
        });
        let mut reader = probed.reader();
        loop {
            // Also true after a panic.
            let was_over = caller.is_finished();
            let values = probed.drain(&mut reader);
            if was_over && values.is_empty() {
                break;
            }
            if values.is_empty() {
                std::thread::yield_now();
            }
            for value in values {
                assert!(seen.insert(value), "{value:#x} twice");
            }
        }
        caller.join().unwrap()
    });
    let Counts { nested, inside } = counts;
    println!(
        "{calls} calls, {nested} nested, {inside} inside a detour, {} lost",
        probed.lost()
    );
    assert!(
        inside >= WANTED,
        "interrupted inside a detour only {inside} times"
    );
    assert_eq!(seen.len() as u64 + probed.lost(), calls + nested);
    let from_handler = seen.iter().filter(|value| **value >= FROM_HANDLER).count();
    assert!(from_handler > 0);
}
