//! Waiting until all events so far are delivered.
//!
//! ```text
//!   asked ──► the collector notes it before a pass ──► everything that this pass holds is delivered ──► done
//! ```
//! Invariant: when a waiter is notified, all events that were in rings and sources when it asked have been
//! delivered, even if a long hit held them up or newer events have come since. A collector that has ended notifies
//! all waiters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use super::order::{Held, PassResult};

#[derive(Debug, Default)]
pub(super) struct Shared {
    asked: AtomicU64,
    answered: Mutex<u64>,
    changed: Condvar,
}

impl Shared {
    fn answer(&self, number: u64) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = number;
        self.changed.notify_all();
    }
}

/// Handle for waiting until a collector has delivered all events so far.
#[derive(Clone, Debug)]
pub struct Flush {
    shared: Arc<Shared>,
    collector: Thread,
}

impl Flush {
    pub(super) fn new(shared: Arc<Shared>, collector: Thread) -> Self {
        Self { shared, collector }
    }

    /// Waits until all events so far are delivered, but at most for `patience`. Returns whether they were
    /// delivered.
    #[must_use]
    pub fn wait(&self, patience: Duration) -> bool {
        let number = self.shared.asked.fetch_add(1, Ordering::AcqRel) + 1;
        self.collector.unpark();
        let answered = self.shared.answered.lock();
        let answered = answered.unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .shared
            .changed
            .wait_timeout_while(answered, patience, |answered| *answered < number);
        *waited.unwrap_or_else(PoisonError::into_inner).0 >= number
    }
}

/// Waiters that the collector has to notify.
#[derive(Debug)]
pub(super) struct Owed {
    shared: Arc<Shared>,
    open: Option<Open>,
    answered: u64,
}

/// Waiters for which the current passes are made.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Number of the last of these waiters.
    number: u64,
    /// Time of the newest event that was held after the first pass that left no more events to take.
    until: Option<u64>,
}

impl Owed {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            open: None,
            answered: 0,
        }
    }

    /// Notes the waiters. Must be called before a pass reads anything.
    pub(super) fn note(&mut self) {
        if self.open.is_none() {
            let asked = self.shared.asked.load(Ordering::Acquire);
            self.open = (asked > self.answered).then_some(Open {
                number: asked,
                until: None,
            });
        }
    }

    /// Must be called after a pass, with its `result` and a function that returns the times of the events that are
    /// still `held`. Notifies the waiters if all events that they wait for have been delivered. Returns whether
    /// another pass is needed for a waiter.
    pub(super) fn passed(
        &mut self,
        result: PassResult,
        held: impl FnOnce() -> Option<Held>,
    ) -> bool {
        let Some(Open { number, until }) = &mut self.open else {
            return false;
        };
        let number = *number;
        let is_over = match result {
            PassResult::Part => false,
            PassResult::Held => {
                held().is_none_or(|Held { oldest, newest }| oldest > *until.get_or_insert(newest))
            }
            PassResult::Nothing | PassResult::All { .. } => true,
        };
        if is_over {
            self.shared.answer(number);
            self.answered = number;
            self.open = None;
        }
        // There may be other waiters by now.
        !is_over || self.shared.asked.load(Ordering::Acquire) > number
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.shared.answer(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owed() -> (Arc<Shared>, Owed) {
        let shared = Arc::<Shared>::default();
        shared.asked.store(1, Ordering::Release);
        let owed = Owed::new(Arc::clone(&shared));
        (shared, owed)
    }

    fn answered(shared: &Shared) -> u64 {
        *shared.answered.lock().unwrap()
    }

    #[test]
    fn who_waits_is_notified_when_what_was_held_then_is_held_no_more() {
        let (shared, mut owed) = owed();
        owed.note();
        let mut pass = |found, oldest, newest| {
            owed.passed(found, || Some(Held { oldest, newest }));
            answered(&shared)
        };
        assert_eq!(pass(PassResult::Part, 1, 3), 0);
        assert_eq!(pass(PassResult::Held, 5, 9), 0);
        // The number of passes does not matter, nor do later events.
        for newest in 9..100 {
            assert_eq!(pass(PassResult::Held, 9, newest), 0);
        }
        assert_eq!(pass(PassResult::Held, 10, 200), 1);
    }

    #[test]
    fn who_asks_during_a_pass_waits_for_what_the_next_one_sees() {
        let (shared, mut owed) = owed();
        owed.note();
        shared.asked.store(2, Ordering::Release);
        assert!(
            owed.passed(PassResult::Nothing, || None),
            "another one waits"
        );
        assert_eq!(answered(&shared), 1);
        owed.note();
        let held = |oldest, newest| move || Some(Held { oldest, newest });
        owed.passed(PassResult::Held, held(1, 2));
        assert_eq!(answered(&shared), 1);
        assert!(!owed.passed(PassResult::All { of_rings: true }, || None));
        assert_eq!(answered(&shared), 2);
    }
}
