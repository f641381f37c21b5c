//! Tests [`Control`] with threads in place of vCPUs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use hvprobe_arch::Regs;

use super::*;

/// Time limit for the threads of a test.
const LIMIT: Duration = Duration::from_secs(60);

/// Polls until `wanted` returns true. After a timeout, panics with `what`, the awaited event, and what `seen`
/// returns.
fn wait_until(what: &str, seen: impl Fn() -> String, wanted: impl Fn() -> bool) {
    let since = Instant::now();
    while !wanted() {
        assert!(
            since.elapsed() < LIMIT,
            "no {what} within {LIMIT:?}: {}",
            seen()
        );
        thread::yield_now();
    }
}

/// Pauses the machine, and waits until it is paused.
fn pause(control: &Control) -> Result<(), StopError> {
    control.pause_now();
    control.wait_paused()
}

/// Returns the standing of thread `index` after `steps` steps.
fn standing(index: usize, steps: u64) -> Standing {
    Standing {
        regs: Regs {
            rip: steps,
            ..Regs::default()
        },
        gs_base: index as u64,
        ..Standing::default()
    }
}

/// Calls `test` while `count` threads run as vCPUs, which count their steps, call `step` at each, and park when
/// asked.
fn with_stepping(
    count: usize,
    step: impl Fn(&Control, usize) + Sync,
    test: impl FnOnce(&Control, &[AtomicU64]),
) {
    with_parking(count, |_, _| {}, step, test);
}

/// Like [`with_stepping`], but the vCPUs call `attend` before they park.
fn with_parking(
    count: usize,
    attend: impl Fn(&Control, usize) + Sync,
    step: impl Fn(&Control, usize) + Sync,
    test: impl FnOnce(&Control, &[AtomicU64]),
) {
    let control = Control::new(count);
    let steps: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        for index in 0..count {
            let (control, steps, attend, step) = (&control, &steps[index], &attend, &step);
            scope.spawn(move || {
                let thread = Kickable::without_signal();
                let mut order = control.park(index, &thread, None);
                while let Order::Run(_) = order {
                    if control.look(index, || {}) {
                        attend(control, index);
                        let taken = steps.load(Ordering::Relaxed);
                        order = control.park(index, &thread, Some(standing(index, taken)));
                        continue;
                    }
                    steps.fetch_add(1, Ordering::Relaxed);
                    step(control, index);
                    thread::yield_now();
                }
            });
        }
        // A failed assertion must not leave the threads running.
        let _end = Ending(&control);
        test(&control, &steps);
    });
}

struct Ending<'a>(&'a Control);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

fn with_vcpus(count: usize, test: impl FnOnce(&Control, &[AtomicU64])) {
    with_stepping(count, |_, _| {}, test);
}

fn total(steps: &[AtomicU64]) -> u64 {
    steps.iter().map(|s| s.load(Ordering::Relaxed)).sum()
}

fn wait_for_step(steps: &AtomicU64) {
    let taken = || steps.load(Ordering::Relaxed);
    let before = taken();
    let seen = || format!("{before} steps, as before");
    wait_until("step", seen, || taken() != before);
}

/// Waits until every vCPU has parked. Then lets those vCPUs continue that nothing keeps.
fn settle(control: &Control) {
    control.transact(|_| None).expect("the vCPUs park");
}

#[test]
fn nothing_runs_while_a_transaction_is_applied() {
    with_vcpus(4, |control, steps| {
        for _ in 0..200 {
            control
                .transact(|_| {
                    let before = total(steps);
                    thread::yield_now();
                    assert_eq!(total(steps), before);
                    None
                })
                .expect("the vCPUs park");
        }
    });
}

#[test]
fn a_transaction_sees_where_every_vcpu_stands_that_has_run() {
    with_vcpus(3, |control, steps| {
        for steps in steps {
            wait_for_step(steps);
        }
        control
            .transact(|standings| {
                let taken = steps.iter().map(|s| s.load(Ordering::Relaxed));
                let expected: Vec<_> = taken.enumerate().map(|(n, s)| standing(n, s)).collect();
                assert_eq!(standings, expected);
                None
            })
            .expect("the vCPUs park");
    });
}

#[test]
fn a_change_that_panics_does_not_leave_the_world_stopped() {
    with_vcpus(1, |control, steps| {
        let panicked = thread::scope(|scope| {
            let change = scope.spawn(|| control.transact(|_| panic!("on purpose")));
            change.join().is_err()
        });
        assert!(panicked);
        wait_for_step(&steps[0]);
    });
}

#[test]
fn a_transaction_during_a_pause_leaves_the_pause_in_force() {
    with_vcpus(2, |control, steps| {
        pause(control).expect("the vCPUs park");
        let before = total(steps);
        settle(control);
        assert_eq!(total(steps), before);
        control.resume();
        wait_for_step(&steps[0]);
    });
}

#[test]
fn a_held_vcpu_does_not_run_until_released_and_others_do() {
    with_vcpus(3, |control, steps| {
        control.hold(0);
        control.hold(1);
        settle(control);
        let before = steps[0].load(Ordering::Relaxed);
        wait_for_step(&steps[2]);
        control.release(1);
        wait_for_step(&steps[1]);
        assert_eq!(steps[0].load(Ordering::Relaxed), before);
        assert!(!control.must_park(2), "a hold is its vCPU's own");
        control.release(0);
        wait_for_step(&steps[0]);
    });
}

#[test]
fn an_nmi_is_taken_once_by_its_own_vcpu_which_runs_on() {
    let taken = [const { AtomicU64::new(0) }; 3];
    let take = |control: &Control, index: usize| {
        if control.take_nmi(index) {
            taken[index].fetch_add(1, Ordering::Relaxed);
        }
    };
    let counts = || taken.each_ref().map(|count| count.load(Ordering::Relaxed));
    with_parking(
        3,
        take,
        |_, _| {},
        |control, steps| {
            pause(control).expect("the vCPUs park");
            // The first NMI is still pending for vCPU 1 when the second is sent.
            for vcpus in [1..2, 1..3] {
                control.send_nmi(vcpus).expect("not ended");
            }
            assert_eq!(counts(), [0, 0, 0], "a paused machine's vCPUs take none");
            control.resume();
            for (index, count) in [0, 1, 1].into_iter().enumerate() {
                let taken = || taken[index].load(Ordering::Relaxed);
                let seen = || format!("{:?}", counts());
                wait_until("NMI", seen, || taken() >= count);
            }
            // A vCPU that has taken its NMI is not asked again.
            for steps in steps {
                wait_for_step(steps);
                wait_for_step(steps);
            }
            assert_eq!(counts(), [0, 1, 1]);
            assert!((0..3).all(|index| !control.look(index, || {})));
            control.end();
            assert_eq!(control.send_nmi(0..1), Err(StopError::Ended));
        },
    );
}

#[test]
fn a_vcpu_pauses_the_machine_without_waiting_for_the_others() {
    let (paused, by_vcpu) = mpsc::channel();
    let once = std::sync::Once::new();
    let pause = |control: &Control, index: usize| {
        if index == 1 {
            once.call_once(|| {
                control.pause_now();
                paused.send(()).expect("the test waits");
            });
        }
    };
    with_stepping(3, pause, |control, steps| {
        by_vcpu.recv_timeout(LIMIT).expect("the vCPU pauses");
        assert!(control.is_paused());
        settle(control);
        let before = total(steps);
        settle(control);
        assert_eq!(total(steps), before);
        control.resume();
        for steps in steps {
            wait_for_step(steps);
        }
    });
}

#[test]
fn a_pause_that_is_resumed_before_it_is_complete_returns() {
    let control = Control::new(1);
    let thread = Kickable::without_signal();
    assert!(matches!(control.park(0, &thread, None), Order::Run(_)));
    thread::scope(|scope| {
        // This vCPU never parks.
        let pause = scope.spawn(|| pause(&control));
        let seen = || format!("paused: {}", control.is_paused());
        wait_until("pause", seen, || control.must_park(0));
        control.resume();
        assert_eq!(pause.join().expect("no panic"), Ok(()));
    });
    assert!(!control.is_paused());
}

#[test]
fn an_ended_machine_refuses_transactions_and_pauses() {
    with_vcpus(2, |control, _| {
        control.end();
        assert_eq!(control.transact(|_| None), Err(StopError::Ended));
        assert_eq!(pause(control), Err(StopError::Ended));
    });
}

#[test]
fn a_kick_ends_a_wait_of_its_thread() {
    with_stepping(
        1,
        |control, index| {
            // If a kick does not end the wait, the wait takes the whole limit.
            let since = Instant::now();
            while !control.must_park(index) {
                thread::park_timeout(LIMIT);
            }
            assert!(since.elapsed() < LIMIT, "no kick came");
        },
        |control, steps| {
            for _ in 0..100 {
                settle(control);
            }
            wait_for_step(&steps[0]);
        },
    );
}
