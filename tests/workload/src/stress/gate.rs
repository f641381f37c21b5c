//! Starts and parks all workers together, so that their counts belong to known intervals.
//!
//! ```text
//!   parked ──start──► running ──settle──► parked ──end──► gone
//! ```
//! A start begins a new round. Every worker runs each round once and then adds one to `parked`. No worker misses a
//! round, because a round begins only when all workers are parked. Nothing spins: all wait on a futex in memory
//! that processes share.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::shared::Shareable;
use crate::sys;

const END: u32 = u32::MAX;

#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// The latest round, or `END`.
    round: AtomicU32,
    /// Limit for the steps of each worker in this round.
    steps: AtomicU64,
    /// The latest round that was stopped.
    over: AtomicU32,
    parked: AtomicU32,
    failed: AtomicU32,
}

// SAFETY: a struct of atomics.
unsafe impl Shareable for Gate {}

impl Gate {
    /// Runs a worker: in each round until the end, calls `step` as often as the round asks for. A failing step ends
    /// the worker.
    pub(crate) fn work(&self, mut step: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        let mut last = 0;
        loop {
            self.park();
            let round = self.next_round(last);
            if round == END {
                return Ok(());
            }
            last = round;
            let steps = self.steps.load(Ordering::Acquire);
            for _ in 0..steps {
                if self.over.load(Ordering::Acquire) == round {
                    break;
                }
                if let Err(error) = step() {
                    self.fail();
                    return Err(error);
                }
            }
        }
    }

    /// Reports that a worker cannot work. It counts as parked, so nothing waits for it.
    pub(crate) fn fail(&self) {
        self.failed.fetch_add(1, Ordering::Release);
        self.park();
    }

    /// Stops the round if it has no limit of steps, and waits until `workers` workers are parked.
    pub(crate) fn settle(&self, workers: usize) -> io::Result<()> {
        if self.steps.load(Ordering::Acquire) == u64::MAX {
            self.stop();
        }
        loop {
            let parked = self.parked.load(Ordering::Acquire);
            if self.failed.load(Ordering::Acquire) > 0 {
                return Err(io::Error::other("a worker failed"));
            }
            if usize::try_from(parked).is_ok_and(|parked| parked >= workers) {
                return Ok(());
            }
            sys::futex_wait(&self.parked, parked);
        }
    }

    /// Makes parked workers run `steps` steps each, or run until [`Gate::settle`] is called.
    pub(crate) fn start(&self, steps: Option<u64>) {
        self.parked.store(0, Ordering::Release);
        self.steps
            .store(steps.unwrap_or(u64::MAX), Ordering::Release);
        self.set_round(self.round.load(Ordering::Acquire) + 1);
    }

    /// Ends all workers, whether they are running or parked.
    pub(crate) fn end(&self) {
        self.stop();
        self.set_round(END);
    }

    fn stop(&self) {
        let round = self.round.load(Ordering::Acquire);
        self.over.store(round, Ordering::Release);
    }

    fn set_round(&self, round: u32) {
        self.round.store(round, Ordering::Release);
        sys::futex_wake(&self.round);
    }

    fn park(&self) {
        self.parked.fetch_add(1, Ordering::Release);
        sys::futex_wake(&self.parked);
    }

    fn next_round(&self, last: u32) -> u32 {
        loop {
            let round = self.round.load(Ordering::Acquire);
            if round != last {
                return round;
            }
            sys::futex_wait(&self.round, round);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Runs three workers while `direct` uses their gate; returns the number of steps made.
    fn with_workers(direct: impl FnOnce(&Gate, &AtomicU64)) -> u64 {
        let (gate, made) = (Gate::default(), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    gate.work(|| {
                        made.fetch_add(1, Ordering::Relaxed);
                        Ok(())
                    })
                });
            }
            gate.settle(3).unwrap();
            direct(&gate, &made);
            gate.end();
        });
        made.into_inner()
    }

    #[test]
    fn rounds_of_known_length_make_just_their_steps() {
        let total = with_workers(|gate, made| {
            assert_eq!(made.load(Ordering::Relaxed), 0);
            for round in 1..=20 {
                gate.start(Some(10));
                gate.settle(3).unwrap();
                assert_eq!(made.load(Ordering::Relaxed), round * 30);
            }
        });
        assert_eq!(total, 600);
    }

    #[test]
    fn nothing_is_made_between_rounds() {
        with_workers(|gate, made| {
            for _ in 0..20 {
                let before = made.load(Ordering::Relaxed);
                gate.start(None);
                while made.load(Ordering::Relaxed) < before + 100 {
                    thread::yield_now();
                }
                gate.settle(3).unwrap();
                let settled = made.load(Ordering::Relaxed);
                thread::yield_now();
                assert_eq!(made.load(Ordering::Relaxed), settled);
            }
        });
    }

    #[test]
    fn failed_worker_is_reported_not_waited_for() {
        let gate = Gate::default();
        thread::scope(|scope| {
            let worker = scope.spawn(|| gate.work(|| Err(io::Error::other("no"))));
            gate.settle(1).unwrap();
            gate.start(Some(5));
            assert!(gate.settle(1).is_err());
            assert!(worker.join().unwrap().is_err());
        });
    }
}
