//! Changes that had to wait because of a task: it may have been under a jump to be written, or in a ghost to be
//! released.
//!
//! ```text
//!   Registry::retry ──due──► Retry::look, without the registry ──► Looked ──► Registry::end_retry
//! ```
//! Invariant: no lock is held during a look, so the registry may change meanwhile. If it does, no jump is written.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use hvprobe_arch::Gva;

use crate::code::scan::{EVER_MAX, Look};
use crate::registry::quiescence::unproven_points;
use crate::registry::release::is_crowded;
use crate::registry::slots::lacks_slots;
use crate::registry::state::Registry;
use crate::sites::site::SiteState;
use crate::unoptimized::Unoptimized;
use crate::world::World;

impl Registry {
    /// Returns the next retry, if it is due: for jumps that wait because a task may have been under them or the
    /// guest had a kprobe there, or for crowded ghosts. Meant to be called once a second; while nothing changes,
    /// retries become less and less frequent.
    pub fn retry(&mut self) -> Option<Retry> {
        // Any previous look is over.
        self.looks.sent_since = None;
        let waits = |site: &SiteState| {
            let why = site.unprepared.as_ref();
            why.is_some_and(Unoptimized::may_pass)
        };
        let is_crowded = is_crowded(&self.code, &self.sites);
        if self.live.is_none() || !is_crowded && !self.sites.values().any(waits) {
            self.looks.rest();
            return None;
        }
        if !self.looks.is_due() {
            return None;
        }
        // Only jumps with boundaries that cannot be int3s have points. The others wait for kprobes or room, not
        // for a look. A jump that a neighbour prevents waits for another change.
        let waiting = self.sites.iter().filter(|(_, site)| waits(site));
        let waiting = waiting.map(|(at, site)| (*at, site));
        let points = unproven_points(waiting, &self.code);
        let is_look = is_crowded || lacks_slots(&self.rules(), &self.code) || !points.is_empty();
        self.looks.sent_since = is_look.then(Vec::new);
        Some(Retry {
            is_look,
            points,
            changes: self.looks.changes,
        })
    }

    /// Makes the changes that the result of a look allows.
    ///
    /// The registry may have changed since the look began, because a look through a large guest can take longer
    /// than the time between two changes. If it has changed, no jump is written: for a probe that existed
    /// meanwhile, the host may have sent a task to an instruction under the jump, and a look does not see that. For
    /// our own code, the result of the look stays valid if the addresses are added that the host has written into
    /// frames meanwhile. The host writes them when it removes the trampoline from frames of leaving probes.
    pub fn end_retry(&mut self, looked: Looked<'_>, world: &dyn World) {
        if self.live.is_none() {
            return;
        }
        let is_same = looked.changes == self.looks.changes;
        let jumps: BTreeMap<_, _> = match is_same {
            true => self.prepare_jumps(world.memory()).into_iter().collect(),
            false => BTreeMap::new(),
        };
        let is_of_use = is_same
            || is_crowded(&self.code, &self.sites)
            || lacks_slots(&self.rules(), &self.code);
        if jumps.is_empty() && (looked.look.is_none() || !is_of_use) {
            return;
        }
        // A change that fails now is tried again later.
        let _ = self.commit_jumps(jumps, looked.look, world);
        self.looks.sent_since = None;
    }

    /// Runs a whole retry at once, for tests.
    #[cfg(test)]
    pub(crate) fn retry_jumps(&mut self, world: &dyn World) {
        if let Some(retry) = self.retry() {
            self.end_retry(retry.look(world), world);
        }
    }
}

/// A retry that is due. [`Retry::look`] can take long, and needs neither the registry nor its lock.
#[derive(Debug)]
pub struct Retry {
    is_look: bool,
    points: BTreeSet<Gva>,
    changes: u64,
}

impl Retry {
    /// Scans the guest's memory while the guest runs.
    #[must_use]
    pub fn look(self, world: &dyn World) -> Looked<'_> {
        let look = self
            .is_look
            .then(|| Look::begin(self.points, EVER_MAX, world));
        Looked {
            look: look.flatten(),
            changes: self.changes,
        }
    }
}

/// The result of a look. While it exists, the guest's writes are logged.
pub struct Looked<'w> {
    look: Option<Look<'w>>,
    changes: u64,
}

impl fmt::Debug for Looked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Looked")
            .field("changes", &self.changes)
            .finish_non_exhaustive()
    }
}
