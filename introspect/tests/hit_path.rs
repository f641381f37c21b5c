//! The hit path allocates nothing, whatever happens on it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::mpsc;

use hvprobe_arch::Gva;
use hvprobe_introspect::definition::parse;
use hvprobe_introspect::event::Collector;
use hvprobe_introspect::probe::ProbeSpec;
use hvprobe_introspect::probe::hit::{HitHandler, Outcome, Stepped, Surroundings};
use hvprobe_introspect::probe::registry::Registry;
// The shared guest below names these as its own crate's.
use hvprobe_introspect::{hidden, image, probe, world};

#[cfg(test)]
#[path = "../src/image/fixture.rs"]
#[allow(dead_code, reason = "shared with the unit tests")]
mod fixture;
#[cfg(test)]
#[path = "../src/testing.rs"]
#[allow(dead_code, reason = "shared with the unit tests")]
mod testing;

use testing::{Guest, STACK, Ticks, regs};

thread_local! {
    /// Calls of the allocator on this thread.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting.
struct Counting;

fn count() {
    // A thread that is ending has no counter any more, and nobody to read it.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count();
        // SAFETY: as above; the memory came from the system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Calls of the allocator that `act` makes.
fn calls_of(act: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    act();
    CALLS.get() - before
}

/// Bytes after the start of the slot at which its copy ends: of `mov rax, [rdi+8]`.
const LEN: u64 = 4;

struct Cpu<'a> {
    guest: &'a Guest,
    handler: HitHandler,
    clock: Ticks,
}

impl Cpu<'_> {
    /// Carries out one hit at `at`; returns how it began.
    fn hit(&mut self, at: Gva, rsp: u64) -> Outcome {
        let around = Surroundings {
            mem: &self.guest.mem,
            clock: &self.clock,
            gs_base: self.guest.gs_base(),
        };
        let mut regs = regs();
        regs.rsp = rsp;
        let outcome = self.handler.hit(at, &mut regs, &around);
        if outcome == Outcome::Step {
            regs.rip += LEN;
            let stepped = self.handler.stepped(&mut regs, &around);
            assert_eq!(stepped, Stepped::Done { more: false });
        }
        outcome
    }
}

#[test]
fn the_allocator_is_counted() {
    assert_eq!(calls_of(|| drop(std::hint::black_box(Box::new(1)))), 2);
}

#[test]
fn hits_allocate_nothing_with_ten_probes_at_one_address_and_a_full_ring() {
    const CAPACITY: usize = 64;
    let guest = Guest::boot(&fixture::probed());
    let mut registry = Registry::new(guest.image.clone(), 1, testing::hidden());
    registry
        .go_live(guest.view(), None, &guest)
        .expect("the guest stops");
    let specs: Vec<_> = ["p filler_000", "p filler_001"]
        .into_iter()
        .cycle()
        .take(20)
        .map(|definition| ProbeSpec {
            definition: parse(definition).expect("a definition"),
            disabled: false,
        })
        .collect();
    registry.register(&specs, &guest).expect("legal");
    let at = |name| guest.image.symbols().address_of(name).expect("there");
    let (emulated, stepped) = (at("filler_000"), at("filler_001"));

    // The listener is busy until it is told otherwise, so the ring stays full.
    let (go_on, busy) = mpsc::channel::<()>();
    let (report, reports) = mpsc::channel();
    let sink = move |events: &[_], dropped: u64| {
        let _ = busy.recv();
        let _ = report.send((events.len() as u64, dropped));
    };
    let (collector, mut producers) =
        Collector::start(1, CAPACITY, Box::new(sink)).expect("a thread can be started");
    let mut handler = HitHandler::new(0, producers.pop().expect("one"));
    handler.adopt(guest.table(), Some(guest.view()));
    let mut cpu = Cpu {
        guest: &guest,
        handler,
        clock: Ticks::default(),
    };

    let hits = 1000;
    let calls = calls_of(|| {
        for _ in 0..hits {
            assert_eq!(cpu.hit(emulated, STACK.0), Outcome::Resume);
            assert_eq!(cpu.hit(stepped, STACK.0), Outcome::Step);
            assert!(matches!(cpu.hit(emulated, 0x1000), Outcome::Fault(_)));
            assert_eq!(cpu.hit(Gva(0), STACK.0), Outcome::Foreign);
        }
    });
    assert_eq!(calls, 0);

    drop(go_on);
    drop(cpu);
    collector.finish();
    let (events, dropped) = reports
        .iter()
        .fold((0, 0), |sum, batch| (sum.0 + batch.0, sum.1 + batch.1));
    assert_eq!(events + dropped, hits * 20);
    assert!(dropped > 0, "the ring was never full");
}
