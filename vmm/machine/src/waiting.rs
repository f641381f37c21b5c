//! Virtual CPUs that wait for room, where hits would be lost otherwise.
//!
//! ```text
//!   virtual CPU                       collector
//!   ───────────                       ─────────
//!   enters itself                     reads the ring
//!   looks at the room ── plenty ──▶   strikes out who is entered, and unparks them
//!   parks ◀──────────────────────────────────┘
//! ```
//! So a virtual CPU that has looked too early finds itself unparked. What is kept true: nobody waits for
//! longer than [`LONGEST`], and whoever is called to a stop goes there at once. It does not go on with the
//! first free cell, or each hit would wait.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Room;

/// The longest that a virtual CPU waits. A guest's watchdogs have twice the patience, at least
/// (`watchdog_thresh` in kernel/watchdog.c).
const LONGEST: Duration = Duration::from_secs(5);
/// How long it waits for plenty of room, rather than for some.
const FOR_PLENTY: Duration = Duration::from_millis(20);

/// Those that wait.
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
        // Whole at every step, so a panic elsewhere does not spoil it.
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is `room`, or `is_called`; whether another try is worth it. `wake` has room made.
    pub(crate) fn wait(
        &self,
        room: impl Fn() -> Room,
        is_called: impl Fn() -> bool,
        wake: impl Fn(),
    ) -> bool {
        let since = Instant::now();
        loop {
            self.enter();
            // What there was a moment ago another virtual CPU may have taken; it is worth another try all
            // the same, or its hit would be lost after as short a time as this.
            let (longest, is_some) = match room() {
                Room::Plenty => return true,
                Room::Scant => (FOR_PLENTY, true),
                Room::None => (self.longest, false),
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

    /// The calling thread waits, or is about to.
    fn enter(&self) {
        let mut threads = self.threads();
        let this = thread::current();
        if !threads.iter().any(|thread| thread.id() == this.id()) {
            threads.push(this);
        }
    }

    /// There may be room now.
    pub(crate) fn look_again(&self) {
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests;
