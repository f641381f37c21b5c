//! Whether somebody may come to the bytes under a jump.
//!
//! A task that was interrupted just before an instruction under the jump goes on there; so does one
//! that was interrupted in a copy, a slot's or a detour's, that ends in a jump to there. Where the
//! jump's byte is an int3 the hit is translated ([`Span::fits`]). For the others a [`Look`] proves that
//! no word of the guest's memory and no virtual CPU leads there; as long as one does, or may do, the
//! site keeps its int3, and is looked at again later, without anybody who waits for that: a look through much memory
//! takes long.
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
use crate::registry::state::Registry;
use crate::sites::site::SiteState;
use crate::unoptimized::Unoptimized;
use crate::world::World;

/// The longest time between two looks, in calls of [`Registry::retry`].
const PATIENCE_MAX: u32 = 64;

/// What nobody may be on the way to for the jump at a site to be written.
struct Unproven {
    site: Gva,
    points: Vec<Gva>,
    /// Copies that lead to one of the points: where they begin, and their length.
    copies: Vec<(Gva, u64)>,
}

/// The instructions under the jump that its bytes cannot be an int3 for.
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

    /// Looks through the guest's memory if the `jumps`, the slots that sites want, or what is left of
    /// probes that have gone make it worth it, and it has at most `most` bytes.
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
        let worth = !points.is_empty() || self.is_crowded() || self.lacks_slots();
        worth.then(|| Look::begin(points, most, world)).flatten()
    }

    /// Takes those of the prepared `jumps` back that somebody may be under. The virtual CPUs must
    /// stand still.
    pub(crate) fn drop_unproven(&mut self, jumps: &mut BTreeMap<Gva, Jump>, still: Still<'_>) {
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
                self.code.let_jump_go(site, jump);
            }
            if let Some(site) = self.sites.get_mut(&site) {
                site.unprepared = Some(Unoptimized::Interrupted);
            }
        }
    }

    /// What jumps wait for where somebody may have been under them or the guest had a kprobe of its own, or what is
    /// left of probes that have gone, if it is time to look. Meant to be called once a second; there is something
    /// less and less often when nothing changes.
    pub fn retry(&mut self) -> Option<Retry> {
        // Whatever look there was is over.
        self.sent_since = None;
        let waits = |site: &SiteState| {
            let why = site.unprepared.as_ref();
            why.is_some_and(Unoptimized::may_pass)
        };
        let is_crowded = self.is_crowded();
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
        // Those that have to go to a place without int3s have points; a neighbour's come and go with other changes.
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

    /// Makes a change of what `looked` allows.
    ///
    /// Something may have been changed since that was begun: a large guest is looked through for longer than some leave
    /// its probes alone. To instructions under jumps the host itself may have sent somebody for a probe that was there in
    /// between, which no look sees: no jump is written then. Of our code what was seen holds whatever was there when, together
    /// with where calls were sent to meanwhile: stubs of what leaves are taken off the stacks.
    pub fn end_retry(&mut self, looked: Looked<'_>, world: &dyn World) {
        if self.live.is_none() {
            return;
        }
        let is_same = looked.changes == self.changes;
        let jumps: BTreeMap<_, _> = match is_same {
            true => self.prepare_jumps(world.memory()).into_iter().collect(),
            false => BTreeMap::new(),
        };
        let is_of_use = is_same || self.is_crowded() || self.lacks_slots();
        if jumps.is_empty() && (looked.look.is_none() || !is_of_use) {
            return;
        }
        // What cannot be changed now is tried again later.
        let _ = self.commit_jumps(jumps, looked.look, world);
        self.sent_since = None;
    }

    /// As once a second, all at once.
    #[cfg(test)]
    pub(crate) fn retry_jumps(&mut self, world: &dyn World) {
        if let Some(retry) = self.retry() {
            self.end_retry(retry.look(world), world);
        }
    }
}

/// What is to be looked for in the guest's memory, however long that takes, without the registry.
#[derive(Debug)]
pub struct Retry {
    is_look: bool,
    points: BTreeSet<Gva>,
    changes: u64,
}

impl Retry {
    /// Looks, while the guest runs.
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

/// What was seen. While there is one, the guest's writes are noted.
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
