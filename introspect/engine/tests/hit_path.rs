//! Checks that the hit path allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::mpsc;

use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gva, Regs};
use hvprobe_engine::{HiddenRegion, Registry, Standing, StopError, WhileStopped, World};
use hvprobe_fixtures::{STACK, probed};
use hvprobe_hit::event::Collector;
use hvprobe_hit::{HitHandler, Outcome, Surroundings};
use hvprobe_spec::definition::parse;
use hvprobe_spec::{Actions, Budget, Change, Decision, Excess, Hold, Item, ProbeSpec};
// The shared guest below uses this name as its own crate's.
use ::hvprobe_engine;

#[cfg(test)]
#[path = "../src/testing.rs"]
#[allow(dead_code, reason = "shared with the unit tests")]
mod testing;

use testing::{TestGuest, Ticks, regs};

thread_local! {
    /// Number of calls of the allocator on this thread.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with a count of its calls.
struct Counting;

fn count() {
    // A thread that is ending has no counter any more, and its count is not needed.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract, which is the same.
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

/// Returns the number of calls of the allocator that `act` makes.
fn calls_of(act: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    act();
    CALLS.get() - before
}

/// Length of the copy of `mov rax, [rdi+8]` in its slot.
const LEN: u64 = 4;
const RESUME: Outcome = Outcome::Resume { shadow: false };

/// A guest with its probes.
struct Rig {
    guest: TestGuest,
    registry: Registry,
}

impl Rig {
    fn new() -> Self {
        Self::of(&probed::vmlinux())
    }

    fn of(elf: &[u8]) -> Self {
        let guest = TestGuest::boot(elf);
        let mut registry = Registry::new(guest.image.clone(), 1, testing::hidden());
        registry
            .go_live(guest.view(), None, &guest)
            .expect("the guest stops");
        Self { guest, registry }
    }

    fn register(&mut self, definition: &str, actions: &Actions) -> Gva {
        let spec = ProbeSpec {
            actions: actions.clone(),
            ..ProbeSpec::from(parse(definition).expect("a definition"))
        };
        let ids = self.registry.register(&[spec], &self.guest).expect("legal");
        let list = self.registry.list(&self.guest.mem);
        let info = list.iter().find(|info| info.id == ids[0]).expect("listed");
        info.addr.expect("placed")
    }
}

struct Cpu<'a> {
    guest: &'a TestGuest,
    handler: HitHandler,
    clock: Ticks,
    regs: Regs,
}

impl Cpu<'_> {
    fn hit(&mut self, at: Gva) -> Outcome {
        let around = Surroundings {
            mem: &self.guest.mem,
            clock: &self.clock,
            gs_base: self.guest.gs_base(),
            cr3: None,
        };
        self.handler.hit(at, &mut self.regs, &around)
    }

    /// Runs a hit at `at` with the stack pointer at `rsp`.
    fn hit_with(&mut self, at: Gva, rsp: u64) -> Outcome {
        self.regs = regs();
        self.regs.rsp = rsp;
        self.hit(at)
    }

    fn resume(&mut self) -> Outcome {
        let around = Surroundings {
            mem: &self.guest.mem,
            clock: &self.clock,
            gs_base: self.guest.gs_base(),
            cr3: None,
        };
        let decision = Decision::default();
        self.handler.resume(&decision, &mut self.regs, &around)
    }

    /// Raises a fault in the copy, with the frame that the processor pushes.
    fn fault(&mut self) {
        let around = Surroundings {
            mem: &self.guest.mem,
            clock: &self.clock,
            gs_base: self.guest.gs_base(),
            cr3: None,
        };
        let frame = [
            0,
            self.regs.rip,
            0x10,
            self.regs.rflags,
            self.regs.rsp,
            0x18,
        ];
        self.regs.rsp -= 0x40;
        for (word, n) in frame.into_iter().zip(0..) {
            let at = Gva(self.regs.rsp + 8 * n);
            self.guest.write(at, &word.to_le_bytes());
        }
        let idt = self.guest.view().idt;
        let outcome = self.handler.exception(14, idt, &mut self.regs, &around);
        assert_eq!(outcome, RESUME);
    }
}

/// Runs `act` with a virtual CPU whose ring of `capacity` events is not emptied. Returns the number of calls of
/// the allocator that `act` makes, and the numbers of events and dropped events.
fn calls_with(rig: &Rig, capacity: usize, mut act: impl FnMut(&mut Cpu<'_>)) -> (u64, (u64, u64)) {
    // The listener is busy until `go_on` is dropped, so the ring stays full.
    let (go_on, busy) = mpsc::channel::<()>();
    let (report, reports) = mpsc::channel();
    let sink = move |events: &[_], dropped: u64| {
        let _ = busy.recv();
        let _ = report.send((events.len() as u64, dropped));
    };
    let (collector, mut producers) =
        Collector::start(1, capacity, Box::new(sink)).expect("a thread can be started");
    let mut handler = HitHandler::new(0, producers.pop().expect("one"));
    handler.adopt(rig.guest.table(), Some(rig.guest.view()));
    let mut cpu = Cpu {
        guest: &rig.guest,
        handler,
        clock: Ticks::default(),
        regs: regs(),
    };
    let calls = calls_of(|| act(&mut cpu));
    drop(go_on);
    drop(cpu);
    collector.finish();
    let events = reports
        .iter()
        .fold((0, 0), |sum, batch| (sum.0 + batch.0, sum.1 + batch.1));
    (calls, events)
}

/// Returns actions of handlers that need no client: captures and changes, some of which fail.
fn busy() -> Actions {
    let memory = |base, offset, len| Item::Memory { base, offset, len };
    Actions {
        capture: vec![
            memory(Gpr::Rsp, 0, 128),
            memory(Gpr::Rax, 0, 8),
            Item::Stack(1),
        ],
        changes: vec![
            Change::Register {
                register: Gpr::R15,
                value: 7,
            },
            Change::Memory {
                base: Some(Gpr::Rsp),
                offset: -0x100,
                bytes: (*b"something").into(),
            },
            Change::Memory {
                base: None,
                offset: 0,
                bytes: (*b"nowhere").into(),
            },
        ],
        ..Actions::default()
    }
}

const HITS: u64 = 1000;

#[test]
fn the_allocator_is_counted() {
    assert_eq!(calls_of(|| drop(std::hint::black_box(Box::new(1)))), 2);
}

#[test]
fn hits_allocate_nothing_with_ten_probes_at_one_address_and_a_full_ring() {
    let mut rig = Rig::new();
    let stepping = Actions {
        post: true,
        faults: true,
        ..busy()
    };
    let mut place = |definition, actions: &Actions| {
        let mut at = Gva(0);
        for _ in 0..10 {
            at = rig.register(definition, actions);
        }
        at
    };
    let emulated = place("p filler_000", &busy());
    let boosted = place("p filler_001", &busy());
    let stepped = place("p filler_003", &stepping);
    let (calls, (events, dropped)) = calls_with(&rig, 64, |cpu| {
        for _ in 0..HITS {
            assert_eq!(cpu.hit_with(emulated, STACK.0), RESUME);
            assert_eq!(cpu.hit_with(boosted, STACK.0), RESUME);
            assert_eq!(cpu.hit_with(stepped, STACK.0), RESUME);
            assert!(cpu.handler.is_stepping());
            let end = Gva(cpu.regs.rip + LEN);
            assert_eq!(cpu.hit(end), RESUME);
            assert_eq!(cpu.regs.rip, stepped.0 + LEN);
            assert_eq!(cpu.hit_with(stepped, STACK.0), RESUME);
            cpu.fault();
            assert!(matches!(cpu.hit_with(emulated, 0x1000), Outcome::Fault(_)));
            assert_eq!(cpu.hit_with(Gva(0), STACK.0), Outcome::Foreign);
        }
    });
    assert_eq!(calls, 0);
    assert_eq!(events + dropped, HITS * 10 * 7);
    assert!(dropped > 0, "the ring was never full");
}

#[test]
fn hits_within_and_beyond_a_budget_allocate_nothing() {
    let mut rig = Rig::new();
    let budget = Budget {
        max_rate: Some(10),
        max_share: Some(50),
        excess: Excess::Sample,
    };
    let spec = ProbeSpec {
        budget: Some(budget),
        actions: busy(),
        ..ProbeSpec::from(parse("p filler_000").expect("a definition"))
    };
    let ids = rig.registry.register(&[spec], &rig.guest).expect("legal");
    let list = rig.registry.list(&rig.guest.mem);
    let at = list[0].addr.expect("placed");
    let (calls, (events, dropped)) = calls_with(&rig, 64, |cpu| {
        for _ in 0..HITS {
            assert_eq!(cpu.hit_with(at, STACK.0), RESUME);
        }
    });
    assert_eq!((calls, events, dropped), (0, 10, 0));
    let list = rig.registry.list(&rig.guest.mem);
    assert_eq!(list[0].id, ids[0]);
    assert_eq!(
        (list[0].counts.hits, list[0].counts.throttled),
        (10, HITS - 10)
    );
}

#[test]
fn entries_and_returns_of_functions_allocate_nothing() {
    let mut rig = Rig::new();
    let actions = Actions {
        capture_at_return: vec![Item::Stack(0)],
        ..busy()
    };
    let emulated = rig.register("r filler_000", &actions);
    rig.register("r filler_000", &actions);
    let boosted = rig.register("r filler_001", &actions);
    let rare = rig.register("r1 filler_002", &actions);
    let ret = Gva(emulated.0 + 0x1000);
    let dead = rig.guest.image.symbols().address_of("do_task_dead");
    let dead = dead.expect("in the fixture");
    let (calls, (events, dropped)) = calls_with(&rig, 64, |cpu| {
        for _ in 0..HITS {
            let frames = [(emulated, 0), (boosted, 1), (rare, 2), (rare, 3)];
            let slots = frames.map(|(_, n)| Gva(STACK.0 - 0x20 * n));
            for ((at, _), slot) in frames.iter().zip(slots) {
                cpu.guest.write(slot, &ret.0.to_le_bytes());
                assert_eq!(cpu.hit_with(*at, slot.0), RESUME);
            }
            // The last call was missed.
            for slot in slots[..3].iter().rev() {
                let found = Gva(u64::from_le_bytes(cpu.guest.read(*slot)));
                assert_ne!(found, ret);
                assert_eq!(cpu.hit_with(found, slot.0 + 8), RESUME);
                assert_eq!(cpu.regs.rip, ret.0);
            }
            // One more call, which ends with its task.
            assert_eq!(cpu.hit_with(emulated, STACK.0), RESUME);
            assert_eq!(cpu.hit_with(dead, STACK.0 - 0x40), RESUME);
        }
    });
    assert_eq!(calls, 0);
    assert_eq!(events + dropped, HITS * 4);
}

#[test]
fn stacks_allocate_nothing_also_with_calls_in_flight() {
    let mut rig = Rig::of(&probed::unwindable());
    let stack = || vec![Item::StackTrace(31)];
    let actions = Actions {
        capture: stack(),
        ..Actions::default()
    };
    let at = rig.register("p filler_000", &actions);
    let caller = rig.register("r filler_001", &Actions::default());
    let returning = Actions {
        capture_at_return: stack(),
        ..Actions::default()
    };
    rig.register("r filler_001", &returning);
    let (calls, (events, dropped)) = calls_with(&rig, 64, |cpu| {
        for _ in 0..HITS {
            let returns = [caller.0 + 8, at.0 + 8, caller.0 + 8, 0];
            let slots = (STACK.0..).step_by(8).map(Gva);
            for (slot, to) in slots.zip(returns) {
                cpu.guest.write(slot, &to.to_le_bytes());
            }
            // The caller's return address becomes the trampoline's.
            assert_eq!(cpu.hit_with(caller, STACK.0 + 8), RESUME);
            assert_eq!(cpu.hit_with(at, STACK.0), RESUME);
            let found = Gva(u64::from_le_bytes(cpu.guest.read(Gva(STACK.0 + 8))));
            assert_ne!(found.0, returns[1]);
            assert_eq!(cpu.hit_with(found, STACK.0 + 16), RESUME);
            assert_eq!(cpu.regs.rip, returns[1]);
        }
    });
    assert_eq!(calls, 0);
    assert_eq!(events + dropped, HITS * 3);
}

#[test]
fn holds_allocate_nothing() {
    let mut rig = Rig::new();
    let stopping = Actions {
        hold: Some(Hold::Stop),
        ..busy()
    };
    let at = rig.register("p filler_000", &stopping);
    let (calls, _) = calls_with(&rig, 64, |cpu| {
        for _ in 0..HITS {
            assert!(matches!(cpu.hit_with(at, STACK.0), Outcome::Hold(_)));
            assert_eq!(cpu.resume(), RESUME);
        }
    });
    assert_eq!(calls, 0);
}
