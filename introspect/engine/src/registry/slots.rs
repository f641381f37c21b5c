//! How a site's instruction takes effect, and the slots for that.
//!
//! The mechanisms, cheapest first: *emulated* needs no slot, a *boosted* slot ends in a jump back, a *stepped*
//! slot ends in an int3. Stepped is used for instructions that must fault inside the exception window, because
//! they have an exception-table entry or a probe asks for their faults, and for post-handlers of instructions
//! that are not emulated. Invariants: no task is in a stepped slot while the virtual CPUs are stopped, so the
//! slot may be released then. A task may always have been interrupted in a boosted slot, so the slot keeps its
//! content as a *ghost* for the next probe at the same instruction, until there are no other slots and no word
//! of guest memory points into it.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, Displaced, RelocateError, SLOT_SIZE, SlotCode, SlotKind};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::trap::IDT_SIZE;
use hvprobe_spec::{Mechanism, ProbeId};
use tracing::{info, warn};

use crate::code::error::HiddenError;
use crate::code::region::HiddenRegion;
use crate::code::scan::Still;
use crate::refusal::{Obstacle, Obstacles, Refused};
use crate::registry::state::Registry;
use crate::sites::site::SiteState;

impl Registry {
    /// Returns how `site`'s instruction takes effect with the enabled probes, or would with all probes if none
    /// is enabled.
    pub(crate) fn mechanism(&self, site: &SiteState) -> Mechanism {
        let enabled = |id: &ProbeId| self.probes.is_enabled(*id);
        let any = site.members.iter().any(enabled);
        let counts = |id: &ProbeId| !any || enabled(id);
        if self.is_or_would_be_jump(site, counts) {
            return Mechanism::Optimized;
        }
        mechanism_of(self.slot_kind_for(site, |id| counts(&id)))
    }

    fn is_or_would_be_jump(&self, site: &SiteState, counts: impl Fn(&ProbeId) -> bool) -> bool {
        if site.is_armed() {
            return site.jump().is_some();
        }
        let members = site.members.iter().copied().filter(counts);
        let members = members.filter_map(|id| Some((id, self.probes.get(id)?)));
        let rules = self.rules();
        self.code.region.detours.is_some()
            && site.unprepared.is_none()
            && rules.fit(site).is_ok()
            && rules.synchronous(members).is_none()
    }

    /// Returns the kind of slot that `site` needs for its enabled probes.
    fn slot_kind(&self, site: &SiteState) -> Option<SlotKind> {
        self.slot_kind_for(site, |id| self.probes.is_enabled(id))
    }

    fn slot_kind_for(
        &self,
        site: &SiteState,
        counts: impl Fn(ProbeId) -> bool,
    ) -> Option<SlotKind> {
        let (mut ends, mut least) = (false, Mechanism::Emulated);
        for id in &site.members {
            if counts(*id)
                && let Some(probe) = self.probes.get(*id)
            {
                // The handlers need to know how the copy ended.
                ends |= probe.spec.actions.post || probe.spec.actions.faults;
                least = least.max(probe.spec.mechanism.unwrap_or(least));
            }
        }
        slot_kind(&site.point.displaced, site.point.fixup, ends, least)
    }

    /// Takes and fills the slots that armed sites lack; `jumping` sites need none. Returns the new slot of each
    /// site that changes. A returned slot that was a ghost stays one until [`Registry::reclaim_slot`].
    pub(crate) fn take_slots(
        &mut self,
        jumping: &dyn Fn(&SiteState) -> bool,
        mem: &dyn PhysMemory,
        still: Still<'_>,
    ) -> Result<Vec<(Gva, Option<SlotCode>)>, Obstacles> {
        let rules = self.rules();
        let needed: Vec<(Gva, Displaced, Option<SlotKind>)> = self
            .sites
            .iter()
            .filter(|(_, site)| !site.gone && rules.is_wanted(site))
            .map(|(at, site)| {
                let kind = (!jumping(site)).then(|| self.slot_kind(site));
                (*at, site.point.displaced, kind.flatten())
            })
            .filter(|(at, _, kind)| *kind != self.sites[at].slot.map(|code| code.kind()))
            .collect();
        let mut taken: Vec<(Gva, Option<SlotCode>)> = Vec::new();
        if self.probes.has_return_probes()
            && let Some(live) = &self.live
        {
            // The trampoline must be mapped before a return address can point to it, and stays mapped.
            let mapped = self.code.region.map(mem, &live.view.tables);
            if let Err(source) = mapped
                && let Some(obstacles) = Obstacles::of(self.unmapped_returns(&source))
            {
                return Err(obstacles);
            }
            self.code.region.pin();
        }
        let (mut refused, mut has_looked) = (Vec::new(), false);
        for (at, displaced, kind) in needed {
            let mut code = self.take_slot(&displaced, kind, mem);
            if let Err(Refused::Slot { source, .. }) = &code
                && matches!(
                    source,
                    HiddenError::OutOfSlots(_) | HiddenError::NoneInReach
                )
                && !std::mem::replace(&mut has_looked, true)
            {
                self.release_idle_ghosts(&taken, mem, still);
                code = self.take_slot(&displaced, kind, mem);
            }
            match code {
                Ok(code) => taken.push((at, code)),
                Err(why) => refused.push(Obstacle { at, why }),
            }
        }
        match Obstacles::of(refused) {
            None => Ok(taken),
            Some(obstacles) => {
                self.release_slots(taken, mem);
                Err(obstacles)
            }
        }
    }

    /// Returns the sites with return probes, none of which can be armed because of `source`.
    fn unmapped_returns(&self, source: &HiddenError) -> impl Iterator<Item = Obstacle> {
        let sites = self.sites.iter();
        let sites = sites.filter(|(_, site)| self.probes.any_follows_calls(&site.members));
        sites.map(|(at, _)| Obstacle {
            at: *at,
            why: Refused::Slot {
                at: *at,
                source: source.clone(),
            },
        })
    }

    /// Returns whether sites may want more slots than are free, and there are ghosts to release.
    pub(crate) fn lacks_slots(&self) -> bool {
        if self.code.ghost_slots.len() == 0 {
            return false;
        }
        let rules = self.rules();
        let wants = |site: &&SiteState| {
            site.slot.is_none() && rules.is_wanted(site) && self.slot_kind(site).is_some()
        };
        let wanted = self.sites.values().filter(wants).count() as u64;
        // Not every slot is in reach of every instruction.
        let (left, all) = self.code.region.room();
        wanted > 0 && (wanted > left || left < all / 2)
    }

    fn take_slot(
        &mut self,
        displaced: &Displaced,
        kind: Option<SlotKind>,
        mem: &dyn PhysMemory,
    ) -> Result<Option<SlotCode>, Refused> {
        let Some(kind) = kind else { return Ok(None) };
        let at = displaced.at();
        let Some(live) = &self.live else {
            return Err(Refused::Unmapped { at });
        };
        let tables = live.view.tables;
        let refused = |source| Refused::Slot { at, source };
        if kind == SlotKind::Boosted
            && let Some(code) = self.code.ghost_slots.of(displaced)
        {
            return Ok(Some(code));
        }
        let copy = |slot| match kind {
            SlotKind::Boosted => displaced.boosted(slot),
            SlotKind::Trapped => displaced.trapped(slot),
        };
        if matches!(copy(at), Err(RelocateError::Emulated { .. })) {
            let wanted = mechanism_of(Some(kind));
            return Err(Refused::Mechanism { at, wanted });
        }
        self.code.region.map(mem, &tables).map_err(refused)?;
        if kind == SlotKind::Trapped {
            let mut idt = [0; IDT_SIZE];
            tables
                .read(mem, live.view.idt, &mut idt)
                .map_err(|_| Refused::NoWindow { at })?;
            self.code.region.build_idt(mem, &idt).map_err(refused)?;
        }
        let taken = self.code.region.take(mem, |slot| copy(slot).ok());
        let code = match (taken, self.code.region.last_slot().map(copy)) {
            // No slot can ever hold the copy.
            (Err(HiddenError::NoneInReach), Some(Err(source))) => {
                return Err(Refused::Relocate { at, source });
            }
            (taken, _) => taken.map_err(refused)?,
        };
        if let Err(source) = self.code.region.fill(mem, &code) {
            release_slot(&mut self.code.region, &code, mem);
            return Err(refused(source));
        }
        Ok(Some(code))
    }

    /// Releases the ghost slots that no task can be in, because no slot is left; keeps those already `taken`
    /// for a site.
    fn release_idle_ghosts(
        &mut self,
        taken: &[(Gva, Option<SlotCode>)],
        mem: &dyn PhysMemory,
        still: Still<'_>,
    ) {
        let taken: BTreeSet<Gva> = taken
            .iter()
            .filter_map(|(_, code)| Some(code.as_ref()?.at()))
            .collect();
        let is_taken = |code: &SlotCode| taken.contains(&code.at());
        if self.code.ghost_slots.codes().all(is_taken) {
            return;
        }
        let Some(seen) = still.seen else { return };
        let is_used = |code: &SlotCode| seen.code(code.at(), SLOT_SIZE as u64);
        let idle = |code: &&SlotCode| !is_used(code) && !is_taken(code);
        let idle: Vec<SlotCode> = self
            .code
            .ghost_slots
            .codes()
            .filter(idle)
            .copied()
            .collect();
        for code in idle {
            self.code.ghost_slots.remove(&code);
            release_slot(&mut self.code.region, &code, mem);
        }
        info!(
            stay = self.code.ghost_slots.len(),
            "boosted slots of former probes released"
        );
    }

    /// Releases slots that were taken for a change that did not happen. No task has been in them, except in
    /// ghosts, which stay.
    pub(crate) fn release_slots(
        &mut self,
        taken: Vec<(Gva, Option<SlotCode>)>,
        mem: &dyn PhysMemory,
    ) {
        for code in taken.into_iter().filter_map(|(_, code)| code) {
            if !self.code.ghost_slots.contains(&code) {
                release_slot(&mut self.code.region, &code, mem);
            }
        }
    }

    /// Reclaims `code`, if it was a ghost, because a site uses it now.
    pub(crate) fn reclaim_slot(&mut self, code: &SlotCode) {
        self.code.ghost_slots.remove(code);
    }

    /// Retires the slot of a site: makes it a ghost if it is boosted, and releases it otherwise.
    pub(crate) fn retire_slot(
        &mut self,
        displaced: Displaced,
        code: Option<SlotCode>,
        mem: &dyn PhysMemory,
    ) {
        match code {
            Some(code) if code.kind() == SlotKind::Boosted => {
                self.code.ghost_slots.insert(displaced, code)
            }
            Some(code) => release_slot(&mut self.code.region, &code, mem),
            None => {}
        }
    }
}

/// Returns the kind of slot that an instruction needs for the mechanism `least` or a costlier one. An
/// instruction with a `fixup` in the exception table, or whose end (`ends`) a handler must see, must not fault
/// outside the exception window.
pub(crate) fn slot_kind(
    displaced: &Displaced,
    fixup: bool,
    ends: bool,
    least: Mechanism,
) -> Option<SlotKind> {
    if matches!(displaced.action(), Action::Emulate(_)) && least == Mechanism::Emulated {
        None
    } else if ends || fixup || least == Mechanism::Stepped {
        Some(SlotKind::Trapped)
    } else {
        Some(SlotKind::Boosted)
    }
}

/// Returns how an instruction with this kind of slot takes effect.
pub(crate) fn mechanism_of(kind: Option<SlotKind>) -> Mechanism {
    match kind {
        None => Mechanism::Emulated,
        Some(SlotKind::Boosted) => Mechanism::Boosted,
        Some(SlotKind::Trapped) => Mechanism::Stepped,
    }
}

fn release_slot(region: &mut HiddenRegion, code: &SlotCode, mem: &dyn PhysMemory) {
    if let Err(error) = region.release(mem, code.at()) {
        warn!(%error, "an out-of-line slot could not be released");
    }
}
