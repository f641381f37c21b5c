//! Makes vCPUs wait for room in a ring, so that no hits are lost.
//!
//! ```text
//!   vCPU                              collector
//!   ────                              ─────────
//!   enters itself in the list         reads the ring
//!   checks the room ── plenty ──▶     takes all entries from the list, and unparks them
//!   parks ◀──────────────────────────────────┘
//! ```
//! So a vCPU that has checked too early is unparked. Invariants: no vCPU waits longer than [`LONGEST`], and one
//! that is called to stop returns at once. A vCPU does not continue as soon as one cell is free, because then every
//! hit would wait.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Headroom;

/// Maximum time that a vCPU waits. By default, a guest's watchdogs wait at least twice as long (`watchdog_thresh`
/// in kernel/watchdog.c).
const LONGEST: Duration = Duration::from_secs(5);
/// Time that a vCPU waits for plenty of room, before it makes do with scant room.
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

    /// Waits until `room` returns that there is room, until `is_called` returns true, or for a limited time.
    /// Returns whether another attempt makes sense. `wake` wakes the collector, which makes room.
    pub(crate) fn wait(
        &self,
        room: impl Fn() -> Headroom,
        is_called: impl Fn() -> bool,
        wake: impl Fn(),
    ) -> bool {
        let since = Instant::now();
        loop {
            self.enter();
            // The limit depends on this check alone. If another vCPU has taken the scant room that an earlier check
            // found, this vCPU waits up to the longer limit. Otherwise its hit would be lost after the shorter one.
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

    /// Enters the calling thread in the list, unless it is there already.
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
