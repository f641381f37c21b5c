//! Makes vCPUs wait for room in a ring, so that no hits are lost.
//!
//! ```text
//!   vCPU                              collector
//!   ────                              ─────────
//!   enters itself in the list         reads the ring
//!   checks the room ── plenty ──▶     takes all entries from the list, and unparks them
//!   parks ◀──────────────────────────────────┘
//! ```
//! So a vCPU that checks too early is unparked. Invariants: no vCPU waits longer than [`LONGEST`], and one that
//! is called to a stop goes there at once. A vCPU does not continue with the first free cell, or each hit would
//! wait.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Headroom;

/// Maximum time that a vCPU waits. A guest's watchdogs wait at least twice as long (`watchdog_thresh` in
/// kernel/watchdog.c).
const LONGEST: Duration = Duration::from_secs(5);
/// Time that a vCPU waits for plenty of room before it is content with some.
const FOR_PLENTY: Duration = Duration::from_millis(20);

/// The waiting vCPUs.
#[derive(Debug)]
pub(crate) struct Waiting {
    longest: Duration,
    threads: Mutex<Vec<Thread>>,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            longest: LONGEST,
            threads: Mutex::default(),
        }
    }
}

impl Waiting {
    fn threads(&self) -> MutexGuard<'_, Vec<Thread>> {
        // The list is valid after every step, so a panic elsewhere does not corrupt it.
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is `room` or `is_called` is true; returns whether another attempt makes sense. `wake`
    /// wakes the collector, which makes room.
    pub(crate) fn wait(
        &self,
        room: impl Fn() -> Headroom,
        is_called: impl Fn() -> bool,
        wake: impl Fn(),
    ) -> bool {
        let since = Instant::now();
        loop {
            self.enter();
            // Room that was there a moment ago may have been taken by another vCPU. Another attempt makes sense
            // all the same, or the hit would be lost after so short a time.
            let (longest, is_some) = match room() {
                Headroom::Plenty => return true,
                Headroom::Scant => (FOR_PLENTY, true),
                Headroom::None => (self.longest, false),
            };
            if is_called() {
                return true;
            }
            let Some(left) = longest.checked_sub(since.elapsed()) else {
                return is_some;
            };
            wake();
            thread::park_timeout(left);
        }
    }

    /// Enters the calling thread in the list, once.
    fn enter(&self) {
        let mut threads = self.threads();
        let this = thread::current();
        if !threads.iter().any(|thread| thread.id() == this.id()) {
            threads.push(this);
        }
    }

    /// Wakes all threads in the list, as there may be room now.
    pub(crate) fn look_again(&self) {
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests;
