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
use tracing::info;

use crate::code::error::HiddenError;
use crate::code::ours::OurCode;
use crate::code::region::HiddenRegion;
use crate::code::scan::Seen;
use crate::refusal::{Obstacle, Obstacles, Refused};
use crate::registry::live::Live;
use crate::registry::optimize::Rules;
use crate::sites::probes::Probes;
use crate::sites::site::{SiteState, Sites};

/// Returns how `site`'s instruction takes effect with the enabled probes, or would with all probes if none is
/// enabled.
pub(crate) fn mechanism(site: &SiteState, rules: &Rules<'_>) -> Mechanism {
    let enabled = |id: &ProbeId| rules.probes.is_enabled(*id);
    let any = site.members.iter().any(enabled);
    let counts = |id: &ProbeId| !any || enabled(id);
    let is_jump = match site.is_armed() {
        true => site.jump().is_some(),
        false => rules.has_detours && would_be_jump(site, rules, counts),
    };
    if is_jump {
        return Mechanism::Optimized;
    }
    mechanism_of(slot_kind_for(site, rules.probes, |id| counts(&id)))
}

fn would_be_jump(site: &SiteState, rules: &Rules<'_>, counts: impl Fn(&ProbeId) -> bool) -> bool {
    let members = site.members.iter().copied().filter(counts);
    let members = members.filter_map(|id| Some((id, rules.probes.get(id)?)));
    site.unprepared.is_none() && rules.fit(site).is_ok() && rules.synchronous(members).is_none()
}

/// Returns the kind of slot that `site` needs for its enabled probes.
fn slot_kind_of(site: &SiteState, probes: &Probes) -> Option<SlotKind> {
    slot_kind_for(site, probes, |id| probes.is_enabled(id))
}

fn slot_kind_for(
    site: &SiteState,
    probes: &Probes,
    counts: impl Fn(ProbeId) -> bool,
) -> Option<SlotKind> {
    let (mut ends, mut least) = (false, Mechanism::Emulated);
    for id in &site.members {
        if counts(*id)
            && let Some(probe) = probes.get(*id)
        {
            // The handlers need to know how the copy ended.
            ends |= probe.spec.actions.post || probe.spec.actions.faults;
            least = least.max(probe.spec.mechanism.unwrap_or(least));
        }
    }
    slot_kind(&site.point.displaced, site.point.fixup, ends, least)
}

/// A site whose slot is to change: its address, its instruction, and the kind of slot that it is to have, or `None`
/// for no slot.
pub(crate) type NeededSlot = (Gva, Displaced, Option<SlotKind>);

/// The address of a site, and the slot that it gets; `None` if it is to have no slot.
pub(crate) type NewSlot = (Gva, Option<SlotCode>);

/// Returns the sites to be armed whose slots have to change. Sites for which `jumping` returns true need no slot.
pub(crate) fn needed_slots(
    jumping: &dyn Fn(&SiteState) -> bool,
    rules: &Rules<'_>,
) -> Vec<NeededSlot> {
    rules
        .sites
        .iter()
        .filter(|(_, site)| !site.gone && rules.is_wanted(site))
        .map(|(at, site)| {
            let kind = (!jumping(site)).then(|| slot_kind_of(site, rules.probes));
            (*at, site.point.displaced, kind.flatten())
        })
        .filter(|(at, _, kind)| *kind != rules.sites[at].slot.map(|code| code.kind()))
        .collect()
}

/// Maps the trampoline if there are return probes: it must be mapped before a return address can point to it,
/// and stays mapped.
///
/// # Errors
/// When the trampoline cannot be mapped. The error lists all sites with return probes, as none of them can be
/// armed.
pub(crate) fn map_trampoline(
    probes: &Probes,
    sites: &Sites,
    region: &mut HiddenRegion,
    live: &Live,
    mem: &dyn PhysMemory,
) -> Result<(), Obstacles> {
    if !probes.has_return_probes() {
        return Ok(());
    }
    if let Err(source) = region.map(mem, &live.view.tables) {
        let returns = sites.iter();
        let returns = returns.filter(|(_, site)| probes.any_follows_calls(&site.members));
        let unmapped = returns.map(|(at, _)| Obstacle {
            at: *at,
            why: Refused::Slot {
                at: *at,
                source: source.clone(),
            },
        });
        if let Some(obstacles) = Obstacles::of(unmapped) {
            return Err(obstacles);
        }
    }
    region.pin();
    Ok(())
}

/// Takes and fills the slots that are `needed`. A returned slot that was a ghost remains a ghost until
/// [`OurCode::reclaim_slot`]. If no slot is left, the ghosts in which no task was `seen` are released.
///
/// # Errors
/// The sites that get no slot; then none is taken.
pub(crate) fn take_slots(
    needed: Vec<NeededSlot>,
    code: &mut OurCode,
    live: &Live,
    mem: &dyn PhysMemory,
    seen: Option<&Seen>,
) -> Result<Vec<NewSlot>, Obstacles> {
    let mut taken: Vec<NewSlot> = Vec::new();
    let (mut refused, mut has_looked) = (Vec::new(), false);
    for (at, displaced, kind) in needed {
        let mut slot = take_slot(&displaced, kind, live, code, mem);
        if let Err(Refused::Slot { source, .. }) = &slot
            && matches!(
                source,
                HiddenError::OutOfSlots(_) | HiddenError::NoneInReach
            )
            && !std::mem::replace(&mut has_looked, true)
        {
            if let Some(seen) = seen {
                release_idle_ghosts(&taken, code, seen, mem);
            }
            slot = take_slot(&displaced, kind, live, code, mem);
        }
        match slot {
            Ok(slot) => taken.push((at, slot)),
            Err(why) => refused.push(Obstacle { at, why }),
        }
    }
    match Obstacles::of(refused) {
        None => Ok(taken),
        Some(obstacles) => {
            release_slots(taken, code, mem);
            Err(obstacles)
        }
    }
}

/// Returns whether sites may want more slots than are free, and there are ghosts to release.
pub(crate) fn lacks_slots(rules: &Rules<'_>, code: &OurCode) -> bool {
    if code.ghost_slots.len() == 0 {
        return false;
    }
    let wants = |site: &&SiteState| {
        let kind = || slot_kind_of(site, rules.probes);
        site.slot.is_none() && rules.is_wanted(site) && kind().is_some()
    };
    let wanted = rules.sites.values().filter(wants).count() as u64;
    // Not every slot is in reach of every instruction.
    let (left, all) = code.region.room();
    wanted > 0 && (wanted > left || left < all / 2)
}

fn take_slot(
    displaced: &Displaced,
    kind: Option<SlotKind>,
    live: &Live,
    code: &mut OurCode,
    mem: &dyn PhysMemory,
) -> Result<Option<SlotCode>, Refused> {
    let Some(kind) = kind else { return Ok(None) };
    let at = displaced.at();
    let tables = live.view.tables;
    let refused = |source| Refused::Slot { at, source };
    if kind == SlotKind::Boosted
        && let Some(slot) = code.ghost_slots.of(displaced)
    {
        return Ok(Some(slot));
    }
    let copy = |slot| match kind {
        SlotKind::Boosted => displaced.boosted(slot),
        SlotKind::Trapped => displaced.trapped(slot),
    };
    if matches!(copy(at), Err(RelocateError::Emulated { .. })) {
        let wanted = mechanism_of(Some(kind));
        return Err(Refused::Mechanism { at, wanted });
    }
    code.region.map(mem, &tables).map_err(refused)?;
    if kind == SlotKind::Trapped {
        let mut idt = [0; IDT_SIZE];
        tables
            .read(mem, live.view.idt, &mut idt)
            .map_err(|_| Refused::NoWindow { at })?;
        code.region.build_idt(mem, &idt).map_err(refused)?;
    }
    let taken = code.region.take(mem, |slot| copy(slot).ok());
    let slot = match (taken, code.region.last_slot().map(copy)) {
        // No slot can ever hold the copy.
        (Err(HiddenError::NoneInReach), Some(Err(source))) => {
            return Err(Refused::Relocate { at, source });
        }
        (taken, _) => taken.map_err(refused)?,
    };
    if let Err(source) = code.region.fill(mem, &slot) {
        code.release_slot(&slot, mem);
        return Err(refused(source));
    }
    Ok(Some(slot))
}

/// Releases the ghost slots in which no task was `seen`; keeps those already `taken` for a site.
fn release_idle_ghosts(taken: &[NewSlot], code: &mut OurCode, seen: &Seen, mem: &dyn PhysMemory) {
    let taken: BTreeSet<Gva> = taken
        .iter()
        .filter_map(|(_, slot)| Some(slot.as_ref()?.at()))
        .collect();
    let is_taken = |slot: &SlotCode| taken.contains(&slot.at());
    if code.ghost_slots.codes().all(is_taken) {
        return;
    }
    let is_used = |slot: &SlotCode| seen.code(slot.at(), SLOT_SIZE as u64);
    let idle = |slot: &&SlotCode| !is_used(slot) && !is_taken(slot);
    let idle: Vec<SlotCode> = code.ghost_slots.codes().filter(idle).copied().collect();
    for slot in idle {
        code.ghost_slots.remove(&slot);
        code.release_slot(&slot, mem);
    }
    info!(
        stay = code.ghost_slots.len(),
        "boosted slots of former probes released"
    );
}

/// Releases slots that were taken for a change that did not happen. No task has been in them, except in ghosts,
/// which stay.
pub(crate) fn release_slots(taken: Vec<NewSlot>, code: &mut OurCode, mem: &dyn PhysMemory) {
    for slot in taken.into_iter().filter_map(|(_, slot)| slot) {
        if !code.ghost_slots.contains(&slot) {
            code.release_slot(&slot, mem);
        }
    }
}

/// Returns the kind of slot that an instruction needs for the mechanism `least` or a costlier one; `None` if it is
/// emulated. An instruction with a `fixup` in the exception table, or whose end (`ends`) a handler must see, must
/// not fault outside the exception window.
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
