//! Tests the table of calls in flight, compiled from the crate's own source, under every interleaving and every
//! reordering that the memory model allows.
//!
//! A record has many words, each a point where threads can be interleaved, so the number of
//! preemptions is bounded where a test writes records; see [`check`].

use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::ProbeId;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;

mod atomics {
    pub(crate) use loom::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    };

    /// Small, because every interleaving is tried. Every task may be in every cell.
    pub(crate) const WINDOW: usize = 2;
    pub(crate) const FIRST_LOG2: u32 = 0;
}

#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    clippy::enum_variant_names,
    reason = "it is a part of the crate, of which less is used and seen here"
)]
#[path = "../src/calls/mod.rs"]
mod calls;

use calls::{Calls, DATA_MAX, Ended, Entry, MaxActive, Pool, ReturnAddress};

const A: Gva = Gva(0xffff_8880_0010_0000);
const B: Gva = Gva(0xffff_8880_0020_0000);
const C: Gva = Gva(0xffff_8880_0030_0000);

/// Runs `test` in every way that takes the processor away from a running thread at most
/// `preemptions` times.
fn check(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 20_000;
    model.check(test);
}

struct Machine {
    calls: Calls,
    pool: Pool,
}

/// A machine with two cells, which are the window of every task.
fn machine(maxactive: MaxActive) -> Arc<Machine> {
    let calls = Calls::new(2, 2);
    let pool = calls.pool(ProbeId(1), maxactive, 8).expect("a pool");
    Arc::new(Machine { calls, pool })
}

fn regs(id: u64) -> Regs {
    Regs {
        rax: id,
        rflags: !id,
        ..Regs::default()
    }
}

impl Machine {
    /// Makes a call with its return address at `slot`; `false` if it was missed.
    fn enter(&self, task: Gva, slot: u64) -> bool {
        let Some(mut open) = self.calls.open(task) else {
            return false;
        };
        let found = Gva(slot + 1);
        let ret = open.enter(Gva(slot), ReturnAddress::Caller(found), |call| {
            panic!("an orphan: {call:?}");
        });
        assert_eq!(ret, Some(found));
        open.push(
            &self.pool,
            &Entry {
                id: slot,
                slot: Gva(slot),
                ret: found,
                host_ns: 0,
                guest_tsc: 0,
                regs: &regs(slot),
                data: &slot.to_le_bytes(),
            },
        )
    }

    /// Makes the return of a call that was not missed.
    fn ret(&self, task: Gva, slot: u64) {
        assert!(self.try_ret(task, slot), "the call was lost");
    }

    /// Makes a return; `false` if there is no such call.
    fn try_ret(&self, task: Gva, slot: u64) -> bool {
        let mut seen = 0;
        let mut open = self.calls.open(task).expect("the task's own cell");
        let to = open.returned(Gva(slot), |how, call| {
            seen += 1;
            assert_eq!(how, Ended::Returned);
            assert_eq!((call.id(), call.slot().0), (slot, slot));
            assert_eq!(call.regs(), regs(slot));
            assert_eq!(call.data(&mut [0; DATA_MAX]), slot.to_le_bytes());
        });
        assert!(to.is_none() || to == Some(Gva(slot + 1)));
        assert_eq!(seen, u32::from(to.is_some()));
        to.is_some()
    }

    /// Checks that no call is left and the pool is unused, and that there is room for exactly `free` new calls.
    fn end(&self, free: u64) {
        self.calls.live(|call| panic!("left over: {call:?}"));
        assert_eq!(self.pool.active(), 0);
        for i in 0..free {
            assert!(self.enter(A, 0x1000 - i * 8));
        }
        assert!(!self.enter(A, 0x100));
    }
}

/// Runs `other` in a second thread and `this` in the first.
fn both(
    machine: &Arc<Machine>,
    this: impl FnOnce(&Machine),
    other: impl FnOnce(&Machine) + Send + 'static,
) {
    let shared = Arc::clone(machine);
    let thread = thread::spawn(move || other(&shared));
    this(machine);
    thread.join().expect("the other thread");
}

#[test]
fn tasks_that_want_the_same_cells_do_not_meet() {
    check(3, || {
        let machine = machine(MaxActive::Fixed(4));
        // An idle cell that both may take over, and an empty one.
        drop(machine.calls.open(C));
        let visits = |task: Gva| {
            move |machine: &Machine| {
                for _ in 0..2 {
                    drop(machine.calls.open(task).expect("one of two cells"));
                }
            }
        };
        both(&machine, visits(A), visits(B));
    });
}

#[test]
fn one_instance_goes_to_one_call() {
    check(2, || {
        let machine = machine(MaxActive::Fixed(1));
        let call = |task: Gva, slot: u64| {
            move |machine: &Machine| {
                if machine.enter(task, slot) {
                    machine.ret(task, slot);
                }
            }
        };
        both(&machine, call(A, 0x1000), call(B, 0x2000));
        machine.end(1);
    });
}

#[test]
fn enough_instances_are_never_missed() {
    check(2, || {
        let machine = machine(MaxActive::Fixed(2));
        let calls = |task: Gva, slot: u64| {
            move |machine: &Machine| {
                for _ in 0..2 {
                    assert!(machine.enter(task, slot));
                    machine.ret(task, slot);
                }
            }
        };
        both(&machine, calls(A, 0x1000), calls(B, 0x2000));
        machine.end(2);
    });
}

#[test]
fn a_pool_that_two_calls_find_empty_grows_for_both() {
    check(2, || {
        let machine = machine(MaxActive::Auto);
        let call = |task: Gva, slot: u64| {
            move |machine: &Machine| {
                assert!(machine.enter(task, slot));
                assert!(machine.enter(task, slot - 8));
                machine.ret(task, slot - 8);
                machine.ret(task, slot);
            }
        };
        both(&machine, call(A, 0x1000), call(B, 0x2000));
        assert_eq!(machine.pool.active(), 0);
    });
}

#[test]
fn a_task_that_migrates_takes_its_calls_along() {
    check(3, || {
        let machine = machine(MaxActive::Fixed(2));
        // The guest's run queue: the task is put there by one processor and taken by another.
        let runnable = Arc::new(AtomicBool::new(false));
        let queue = Arc::clone(&runnable);
        both(
            &machine,
            |machine| {
                assert!(machine.enter(A, 0x1000));
                runnable.store(true, Ordering::Release);
                assert!(machine.enter(B, 0x2000));
                machine.ret(B, 0x2000);
            },
            move |machine| {
                while !queue.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                machine.ret(A, 0x1000);
            },
        );
        machine.end(2);
    });
}

#[test]
fn a_call_that_is_seen_is_seen_whole() {
    check(2, || {
        let machine = machine(MaxActive::Fixed(2));
        // Says that the task has left the first processor, but orders nothing: only the cell orders the words of
        // the record.
        let left = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&left);
        both(
            &machine,
            |machine| {
                assert!(machine.enter(A, 0x1000));
                left.store(1, Ordering::Relaxed);
            },
            move |machine| {
                if seen.load(Ordering::Relaxed) == 1
                    && let Some(mut open) = machine.calls.open(A)
                {
                    open.returned(Gva(0x1000), |_, call| {
                        assert_eq!(call.regs(), regs(0x1000));
                        assert_eq!(call.data(&mut [0; DATA_MAX]), 0x1000_u64.to_le_bytes());
                    });
                }
            },
        );
    });
}
