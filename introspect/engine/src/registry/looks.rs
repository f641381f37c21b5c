//! When the next look for tasks under jumps and in ghosts is due, and what a look does not see.
//!
//! ```text
//!   at rest ──something waits──► waiting 1, 2, 4 … INTERVAL_MAX calls ──► look due ──► waiting, twice as long
//!      └───────────────────────────── nothing waits any more ─────────────────────────────┘
//! ```
//! Invariant: while a look of a [`Retry`](super::Retry) is under way, `sent_since` has the addresses that the
//! engine wrote into frames that return through the trampoline. The addresses to which stubs return are read from
//! the instances when the look ends. A look that begins and ends within one change does not need `sent_since`,
//! because the change itself passes on the addresses that it wrote.

use hvprobe_arch::Gva;

/// Maximum time between two looks, in calls of [`Looks::is_due`].
const INTERVAL_MAX: u32 = 64;

/// State of the looks.
#[derive(Debug)]
pub(crate) struct Looks {
    /// Number of changes of the guest's text or of our code.
    pub(crate) changes: u64,
    /// Addresses that the host has written into frames of calls since the look of a retry began: a look does not
    /// see writes of the host. `None` while no such look is under way.
    pub(crate) sent_since: Option<Vec<Gva>>,
    /// Number of calls of [`Self::is_due`] until the next look.
    left: u32,
    /// Number of calls of [`Self::is_due`] between the next look and the one after it.
    next: u32,
}

impl Default for Looks {
    fn default() -> Self {
        Self {
            changes: 0,
            sent_since: None,
            left: 1,
            next: 2,
        }
    }
}

impl Looks {
    /// Makes the next look due at the next call of [`Self::is_due`], because nothing waits for one now.
    pub(crate) fn rest(&mut self) {
        let rest = Self::default();
        (self.left, self.next) = (rest.left, rest.next);
    }

    /// Returns whether a look is due. If so, the time until the next one is twice as long.
    pub(crate) fn is_due(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return false;
        }
        self.left = self.next;
        self.next = (self.next * 2).min(INTERVAL_MAX);
        true
    }

    /// Notes that the host has directed calls to the addresses `sent_to`.
    pub(crate) fn note_sent(&mut self, sent_to: &[Gva]) {
        if let Some(since) = &mut self.sent_since {
            since.extend(sent_to);
        }
    }
}
