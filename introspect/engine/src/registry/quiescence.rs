//! Proof that no task may reach the bytes under a jump.
//!
//! A task that was interrupted just before an instruction under the jump resumes there. So does a task that was
//! interrupted in a copy, in a slot or a detour, that ends in a jump to that instruction. Where the jump's byte
//! is an int3 the hit is translated ([`Span::fits`]). For the others a [`Look`] proves that no word of the
//! guest's memory and no virtual CPU leads there. As long as one does, or may, the site keeps its int3, and
//! there is another look later that nothing waits for, because a look through much memory takes long.
//!
//! [`Span::fits`]: hvprobe_arch::detour::Span::fits

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Span;
use tracing::debug;

use crate::code::jump::Jump;
use crate::code::scan::{EVER_MAX, Look, Still};
use crate::registry::patience::Patience;
use crate::registry::release::is_crowded;
use crate::registry::state::Registry;
use crate::sites::site::SiteState;
use crate::unoptimized::Unoptimized;
use crate::world::World;

/// Maximum time between two looks, in calls of [`Registry::retry`].
const PATIENCE_MAX: u32 = 64;

/// Places that no task may be about to reach when the jump is written.
struct Unproven {
    site: Gva,
    points: Vec<Gva>,
    /// Copies that lead to one of the points: start and length.
    copies: Vec<(Gva, u64)>,
}

/// Returns the instructions under the jump at which its bytes cannot be an int3.
fn boundaries_without_int3(span: &Span) -> Vec<Gva> {
    let inside = span.interior().filter(|offset| *offset > 2);
    inside
        .map(|offset| span.at().wrapping_add(offset))
        .collect()
}

impl Registry {
    fn unproven(&self, at: Gva, site: &SiteState) -> Option<Unproven> {
        let points = boundaries_without_int3(site.point.span.as_ref().ok()?);
        if points.is_empty() || site.jump().is_some() {
            return None;
        }
        let slots = self
            .code
            .ghost_slots
            .iter()
            .map(|(displaced, code)| (*displaced, *code));
        let own = site.slot.map(|code| (site.point.displaced, code));
        let slots = slots.chain(own).filter_map(|(displaced, code)| {
            let leads = displaced.leads_to().any(|to| points.contains(&to));
            leads.then(|| (code.at(), code.bytes().len() as u64))
        });
        let ghosts = self.code.ghost_jumps.iter();
        let others = ghosts.filter(|(of, _)| **of != at);
        let detours = others.flat_map(|(_, jumps)| jumps).filter_map(|jump| {
            let leads = jump.detour.leads_to().any(|to| points.contains(&to));
            leads.then(|| (jump.detour.at(), jump.detour.code().len() as u64))
        });
        let copies = slots.chain(detours).collect();
        Some(Unproven {
            site: at,
            points,
            copies,
        })
    }

    /// Scans the guest's memory, of at most `most` bytes, if the `jumps`, missing slots or crowded ghosts make
    /// it worthwhile.
    pub(crate) fn look<'w>(
        &self,
        jumps: &BTreeMap<Gva, Jump>,
        most: u64,
        world: &'w dyn World,
    ) -> Option<Look<'w>> {
        let unproven = jumps
            .keys()
            .filter_map(|at| self.unproven(*at, self.sites.get(at)?));
        let points: BTreeSet<Gva> = unproven.flat_map(|it| it.points).collect();
        let worth = !points.is_empty() || is_crowded(&self.code, &self.sites) || self.lacks_slots();
        worth.then(|| Look::begin(points, most, world)).flatten()
    }

    /// Retires those of the prepared `jumps` that a task may be under. The virtual CPUs must be stopped.
    pub(crate) fn retire_unproven(&mut self, jumps: &mut BTreeMap<Gva, Jump>, still: Still<'_>) {
        let unproven: Vec<Unproven> = jumps
            .keys()
            .filter_map(|at| self.unproven(*at, self.sites.get(at)?))
            .collect();
        for Unproven {
            site,
            points,
            copies,
        } in unproven
        {
            let is_clear = still.seen.is_some_and(|seen| {
                let in_copy = copies.iter().any(|(start, len)| seen.code(*start, *len));
                !in_copy && !points.iter().any(|point| seen.point(*point))
            });
            if is_clear {
                continue;
            }
            debug!(at = %site, "somebody may be under the jump");
            if let Some(jump) = jumps.remove(&site) {
                self.code.retire_jump(site, jump);
            }
            if let Some(site) = self.sites.get_mut(&site) {
                site.unprepared = Some(Unoptimized::Interrupted);
            }
        }
    }

    /// Returns the next look, if it is due: for jumps that wait because a task may have been under them or the
    /// guest had a kprobe there, or for crowded ghosts. Meant to be called once a second; while nothing
    /// changes, the looks become less and less frequent.
    pub fn retry(&mut self) -> Option<Retry> {
        // Any previous look is over.
        self.sent_since = None;
        let waits = |site: &SiteState| {
            let why = site.unprepared.as_ref();
            why.is_some_and(Unoptimized::may_pass)
        };
        let is_crowded = is_crowded(&self.code, &self.sites);
        if self.live.is_none() || !is_crowded && !self.sites.values().any(waits) {
            self.patience = Patience::default();
            return None;
        }
        self.patience.left = self.patience.left.saturating_sub(1);
        if self.patience.left > 0 {
            return None;
        }
        let next = self.patience.next;
        self.patience = Patience {
            left: next,
            next: (next * 2).min(PATIENCE_MAX),
        };
        // Only jumps with boundaries that cannot be int3s have points. The others wait for kprobes or room, not
        // for a look. A jump that a neighbour prevents waits for another change.
        let unproven = self.sites.iter().filter(|(_, site)| waits(site));
        let unproven = unproven.filter_map(|(at, site)| self.unproven(*at, site));
        let points: BTreeSet<Gva> = unproven.flat_map(|it| it.points).collect();
        let is_look = is_crowded || self.lacks_slots() || !points.is_empty();
        self.sent_since = is_look.then(Vec::new);
        Some(Retry {
            is_look,
            points,
            changes: self.changes,
        })
    }

    /// Makes the changes that the result of a look allows.
    ///
    /// The registry may have changed since the look began, because a look through a large guest can take longer
    /// than the time between two changes. Then no jump is written: for a probe that existed in between the host
    /// may have sent a task to an instruction under the jump, and a look does not see that. For our own code
    /// the result stays valid, together with the addresses that calls were directed to meanwhile: the stubs of
    /// leaving probes are taken off the stacks.
    pub fn end_retry(&mut self, looked: Looked<'_>, world: &dyn World) {
        if self.live.is_none() {
            return;
        }
        let is_same = looked.changes == self.changes;
        let jumps: BTreeMap<_, _> = match is_same {
            true => self.prepare_jumps(world.memory()).into_iter().collect(),
            false => BTreeMap::new(),
        };
        let is_of_use = is_same || is_crowded(&self.code, &self.sites) || self.lacks_slots();
        if jumps.is_empty() && (looked.look.is_none() || !is_of_use) {
            return;
        }
        // A change that fails now is tried again later.
        let _ = self.commit_jumps(jumps, looked.look, world);
        self.sent_since = None;
    }

    /// Runs a whole retry at once, for tests.
    #[cfg(test)]
    pub(crate) fn retry_jumps(&mut self, world: &dyn World) {
        if let Some(retry) = self.retry() {
            self.end_retry(retry.look(world), world);
        }
    }
}

/// A look that is due. It needs no registry, however long it takes.
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
