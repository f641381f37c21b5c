//! Waiting until what has happened is handed on.
//!
//! ```text
//!   asked ──► the collector notes it before a pass ──► a pass that leaves nothing, or [`LONGEST`] ──► told
//! ```
//! Invariant: when it is told, all that lay in rings and sources when it was asked for was handed on. A
//! collector that has ended tells everybody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::order::Found;

/// How long events may be held because others that are older may come. Sources keep nothing back so long.
const LONGEST: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Shared {
    asked: AtomicU64,
    told: Mutex<u64>,
    changed: Condvar,
}

impl Shared {
    fn tell(&self, number: u64) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = number;
        self.changed.notify_all();
    }
}

/// Waits for a collector.
#[derive(Clone, Debug)]
pub struct Flush {
    shared: Arc<Shared>,
    collector: Thread,
}

impl Flush {
    pub(super) fn new(shared: Arc<Shared>, collector: Thread) -> Self {
        Self { shared, collector }
    }

    /// Returns when everything that has happened was handed on, or `patience` is over; says which.
    #[must_use]
    pub fn wait(&self, patience: Duration) -> bool {
        let number = self.shared.asked.fetch_add(1, Ordering::AcqRel) + 1;
        self.collector.unpark();
        let told = self.shared.told.lock();
        let told = told.unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .shared
            .changed
            .wait_timeout_while(told, patience, |told| *told < number);
        *waited.unwrap_or_else(PoisonError::into_inner).0 >= number
    }
}

/// What the collector owes to those who wait.
#[derive(Debug)]
pub(super) struct Owed {
    shared: Arc<Shared>,
    /// For whom, and since when.
    open: Option<(u64, Instant)>,
    told: u64,
}

impl Owed {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            open: None,
            told: 0,
        }
    }

    /// Notes who waits. Before a pass looks at anything.
    pub(super) fn note(&mut self) {
        if self.open.is_none() {
            let asked = self.shared.asked.load(Ordering::Acquire);
            self.open = (asked > self.told).then(|| (asked, Instant::now()));
        }
    }

    /// A pass has `found` that; whether somebody waits for another one.
    pub(super) fn passed(&mut self, found: Found) -> bool {
        let Some((number, since)) = self.open else {
            return false;
        };
        let is_over = match found {
            Found::Part => false,
            Found::Held => since.elapsed() >= LONGEST,
            Found::Nothing | Found::All { .. } => true,
        };
        if is_over {
            self.shared.tell(number);
            self.told = number;
            self.open = None;
        }
        // There may be others by now.
        !is_over || self.shared.asked.load(Ordering::Acquire) > number
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.shared.tell(u64::MAX);
    }
}
