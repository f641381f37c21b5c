//! Makes guest text agree with the registry: one stop of the virtual CPUs, whole or not at all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::JUMP;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_hit::calls::Fate;
use hvprobe_hit::region::{Fixtures, KERNEL_WINDOW};
use hvprobe_hit::table::ProbeTable;
use hvprobe_hit::{Stacks, restore_frame};
use rustc_hash::FxHashSet;
use tracing::warn;

use crate::code::jump::Jump;
use crate::code::ours::OurCode;
use crate::code::region::HiddenRegion;
use crate::code::scan::{AT_HOOK_MAX, AT_ONCE_MAX, Look, Seen, Still};
use crate::refusal::{Obstacle, Obstacles, Refused};
use crate::registry::ftrace::{look_at_ftrace, watches_ftrace};
use crate::registry::guest_kprobes::{keep_from_kprobes, leave_to_kprobes, retire_at_kprobes};
use crate::registry::live::Live;
use crate::registry::optimize::Rules;
use crate::registry::prepare::{Wanted, reserve_detours};
use crate::registry::quiescence::{retire_unproven, unproven_points};
use crate::registry::recorders::settle_sources;
use crate::registry::release::{is_crowded, release_unreached, restore_followed_frames};
use crate::registry::slots::{
    NewSlot, lacks_slots, map_trampoline, needed_slots, release_slots, take_slots,
};
use crate::registry::state::{Registry, Shared};
use crate::registry::table::table;
use crate::sites::probes::Probes;
use crate::sites::site::{Patch, SiteState, Sites, patched};
use crate::sites::text::{Edit, Text, is_rewritten};
use crate::unoptimized::Unoptimized;
use crate::world::{Standing, StopError, World};

/// Why a change did not happen.
#[derive(Debug)]
pub(crate) enum CommitError {
    Stop(StopError),
    Sites(Obstacles),
}

impl Registry {
    /// Makes the [`change`](Self::change) in one stop of the virtual CPUs, if the kernel is live.
    pub(crate) fn commit(&mut self, world: &dyn World) -> Result<(), CommitError> {
        self.commit_timed(AT_ONCE_MAX, world).map(|_| ())
    }

    /// As [`Self::commit`], for a change that a virtual CPU waits for: less memory is scanned.
    pub(crate) fn commit_at_hook(&mut self, world: &dyn World) -> Result<(), CommitError> {
        self.commit_timed(AT_HOOK_MAX, world).map(|_| ())
    }

    /// As [`Self::commit`], with looks limited to `most` bytes of guest memory. Returns how long the virtual
    /// CPUs were stopped.
    pub(crate) fn commit_timed(
        &mut self,
        most: u64,
        world: &dyn World,
    ) -> Result<Duration, CommitError> {
        if self.live.is_none() {
            return Ok(Duration::ZERO);
        }
        let jumps = self.prepare_jumps(world.memory());
        let jumps = jumps.into_iter().collect();
        let look = self.look(&jumps, most, world);
        self.commit_jumps(jumps, look, world)
    }

    /// Makes the detours that sites want and do not have yet. The guest may run meanwhile.
    pub(crate) fn prepare_jumps(&mut self, mem: &dyn PhysMemory) -> Vec<(Gva, Jump)> {
        let wanted = Wanted::of(&self.rules(), &self.code.sources);
        if wanted.is_empty() {
            return Vec::new();
        }
        let around = match &self.live {
            Some(live) => reserve_detours(live, self.vcpus, &mut self.code, mem),
            None => Err(Unoptimized::NoRoom),
        };
        wanted.make(&around, &self.probes, &mut self.sites, &mut self.code, mem)
    }

    /// Scans the guest's memory if there is a reason: a task may be under one of the `jumps`, slots are missing, or
    /// ghosts are crowded. Returns `None` if there is no reason, if there are more than `most` bytes to scan, or if
    /// the scan is not possible.
    pub(crate) fn look<'w>(
        &self,
        jumps: &BTreeMap<Gva, Jump>,
        most: u64,
        world: &'w dyn World,
    ) -> Option<Look<'w>> {
        let these = jumps
            .keys()
            .filter_map(|at| Some((*at, self.sites.get(at)?)));
        let points = unproven_points(these, &self.code);
        let worth = !points.is_empty()
            || is_crowded(&self.code, &self.sites)
            || lacks_slots(&self.rules(), &self.code);
        worth.then(|| Look::begin(points, most, world)).flatten()
    }

    /// Makes the [`change`](Self::change) in one stop. Of the prepared `jumps`, writes only those that the `look`
    /// allows.
    pub(crate) fn commit_jumps(
        &mut self,
        mut jumps: BTreeMap<Gva, Jump>,
        mut look: Option<Look<'_>>,
        world: &dyn World,
    ) -> Result<Duration, CommitError> {
        let mut result = Ok(());
        let stopped = world.stopped(&mut |mem, standing| {
            if let Some(none) = self.forget_replaced(mem, standing) {
                return Some(none);
            }
            let seen = look.as_mut().and_then(|look| look.end(standing));
            let still = Still { standing, seen };
            self.retire_unusable(&mut jumps, mem, still);
            self.change(&mut jumps, mem, still)
                .map_err(|obstacles| result = Err(CommitError::Sites(obstacles)))
                .ok()
        });
        drop(look);
        if self.replaced {
            // The sites and jumps of the first kernel are gone.
            self.drain_sources(world);
        } else {
            self.code.retire_jumps(jumps);
        }
        let stopped_for = stopped.map_err(CommitError::Stop)?;
        result.map(|()| stopped_for)
    }

    /// Retires those of the prepared `jumps` that must not be written now. The virtual CPUs must be stopped.
    pub(crate) fn retire_unusable(
        &mut self,
        jumps: &mut BTreeMap<Gva, Jump>,
        mem: &dyn PhysMemory,
        still: Still<'_>,
    ) {
        let (sites, code) = (&mut self.sites, &mut self.code);
        if let Some(live) = &self.live {
            let tables = &live.view.tables;
            retire_at_kprobes(jumps, &self.kprobes.known, sites, code, tables, mem);
        }
        retire_unproven(jumps, sites, code, still.seen);
    }

    /// Arms every site that has a hook or an enabled probe: writes its jump from `jumps`, or an int3. Disarms every
    /// other site, detaches the leaving probes, and releases what is not needed any more. Takes the used jumps out
    /// of `jumps`. Returns the table that matches the text.
    ///
    /// # Errors
    /// The sites that cannot be armed; then nothing has changed.
    pub(crate) fn change(
        &mut self,
        jumps: &mut BTreeMap<Gva, Jump>,
        mem: &dyn PhysMemory,
        still: Still<'_>,
    ) -> Result<Arc<ProbeTable>, Obstacles> {
        self.looks.changes += 1;
        let tables = self.live.as_ref().map(|live| live.view.tables);
        if let Some(tables) = &tables {
            enter_detours(&mut self.code.region, tables, mem)?;
        }
        let (ftrace, live) = (&mut self.hooks.ftrace, self.live.as_ref());
        look_at_ftrace(ftrace, &self.sites, &self.probes, live, mem);
        if let Some(tables) = &tables {
            leave_to_kprobes(&self.kprobes.known, &mut self.sites, tables, mem);
            leave_rewritten(jumps, &mut self.sites, &Text { tables, mem });
        }
        let (mut arming, mut disarming) = (Vec::new(), Vec::new());
        let rules = self.rules();
        for (at, site) in rules.sites {
            if !rules.is_wanted(site) {
                if site.is_armed() {
                    disarming.push(*at);
                }
            } else if !site.gone
                && let Some(patch) = next_patch(&rules, site, jumps.remove(at))
            {
                arming.push((*at, patch));
            }
        }
        let free = tables.as_ref().map_or(Ok(()), |tables| {
            keep_from_kprobes(&arming, &self.kprobes.known, &self.sites, tables, mem)
        });
        let written = free.and_then(|()| self.write(&arming, &disarming, mem, still.seen));
        let slots = match written {
            Ok(slots) => slots,
            Err(obstacles) => {
                let unused = arming.into_iter().filter_map(|(at, patch)| match patch {
                    Patch::Jump(jump) => Some((at, jump)),
                    Patch::None | Patch::Breakpoint => None,
                });
                jumps.extend(unused);
                let live = self.live.as_mut();
                remove_idle_gate(jumps, &self.sites, &mut self.code, live, mem);
                return Err(obstacles);
            }
        };
        // Nothing below can fail. An unused jump may be a ghost with a task in its detour, so it is retired.
        let unused = std::mem::take(jumps);
        self.code.retire_jumps(unused);
        let (sites, code) = (&mut self.sites, &mut self.code);
        let past_int3s = &mut self.shared.past_int3s;
        for at in disarming {
            set_patch(at, Patch::None, sites, code, past_int3s);
        }
        set_slots(slots, sites, code, mem);
        for (at, patch) in arming {
            set_patch(at, patch, sites, code, past_int3s);
        }
        self.hooks.ftrace.watched = watches_ftrace(&self.kernel.image, &self.sites);
        detach_leaving(&self.probes, &mut self.sites, &mut self.code, mem);
        let mut sent_to = Vec::new();
        if let Some(tables) = &tables {
            let (probes, shared, standing) = (&self.probes, &mut self.shared, still.standing);
            if let Some(fixtures) = self.code.region.fixtures() {
                sent_to = restore_frames(probes, shared, &fixtures, tables, mem, standing);
            }
            self.looks.note_sent(&sent_to);
            restore_followed_frames(probes, &self.code, tables, mem);
        }
        settle_sources(&self.code.sources, &self.probes, self.switches);
        if let Some(seen) = still.seen
            && is_crowded(&self.code, &self.sites)
        {
            let sent_to = sent_to.iter().chain(self.looks.sent_since.iter().flatten());
            let calls = &self.shared.returns.calls;
            release_unreached(&mut self.code, seen, sent_to.copied(), calls, mem);
        }
        let live = self.live.as_mut();
        remove_idle_gate(&BTreeMap::new(), &self.sites, &mut self.code, live, mem);
        let table = Arc::new(table(&self.rules(), &self.code, &self.kernel, &self.shared));
        if let Some(kernel) = tables {
            let table = Arc::clone(&table);
            self.code.sources.follow_stacks(Stacks { table, kernel });
        }
        Ok(table)
    }

    /// Takes the slots that armed sites lack, plants the gate, and writes the patches of the sites `arming` and
    /// the original text of the sites `disarming`. Returns the slots. After an error the text is as before and
    /// no slot is taken.
    fn write(
        &mut self,
        arming: &[(Gva, Patch)],
        disarming: &[Gva],
        mem: &dyn PhysMemory,
        seen: Option<&Seen>,
    ) -> Result<Vec<NewSlot>, Obstacles> {
        const NONE: Patch = Patch::None;
        let mut next: BTreeMap<Gva, &Patch> =
            arming.iter().map(|(at, patch)| (*at, patch)).collect();
        next.extend(disarming.iter().map(|at| (*at, &NONE)));
        let jumping = |site: &SiteState| {
            let patch = next.get(&site.point.displaced.at()).copied();
            matches!(patch.unwrap_or(&site.patch), Patch::Jump(_))
        };
        let needed = needed_slots(&jumping, &self.rules());
        let Some(live) = &mut self.live else {
            let at = arming.iter().map(|(at, _)| *at);
            let unmapped = at.map(|at| Obstacle {
                at,
                why: Refused::Unmapped { at },
            });
            return Obstacles::of(unmapped).map_or(Ok(Vec::new()), Err);
        };
        let (probes, sites, code) = (&self.probes, &self.sites, &mut self.code);
        map_trampoline(probes, sites, &mut code.region, live, mem)?;
        let slots = take_slots(needed, code, live, mem, seen)?;
        let tables = live.view.tables;
        let text = Text {
            tables: &tables,
            mem,
        };
        // Text that the guest has rewritten is not restored.
        let mut gone = Vec::new();
        let mut edits = Vec::new();
        for (at, patch) in &next {
            let Some(site) = self.sites.get(at) else {
                continue;
            };
            let edit = edit(&self.sites, site, patch, &next);
            if matches!(patch, Patch::None) && !text.holds(*at, &edit.from) {
                gone.push(*at);
            } else {
                edits.push(edit);
            }
        }
        let planted = plant_gate(live, &text, arming);
        if let Err(obstacles) = planted.and_then(|()| text.replace(&edits)) {
            release_slots(slots, &mut self.code, mem);
            return Err(obstacles);
        }
        for at in gone {
            if let Some(site) = self.sites.get_mut(&at) {
                site.gone = true;
            }
        }
        Ok(slots)
    }
}

/// Marks as gone the armed `sites` that have a prepared jump in `jumps` and whose text the guest has rewritten. So
/// they do not prevent other changes.
fn leave_rewritten(jumps: &BTreeMap<Gva, Jump>, sites: &mut Sites, text: &Text<'_>) {
    let rewritten = jumps.keys().copied().filter(|at| {
        let site = sites.get(at).filter(|site| site.is_armed());
        site.is_some_and(|site| !site.gone && is_rewritten(site, sites, text))
    });
    for at in rewritten.collect::<Vec<_>>() {
        if let Some(site) = sites.get_mut(&at) {
            site.gone = true;
        }
    }
}

/// Maps the memory of detours into the guest, if addresses are reserved for it.
fn enter_detours(
    region: &mut HiddenRegion,
    tables: &PageTables,
    mem: &dyn PhysMemory,
) -> Result<(), Obstacle> {
    let Some(detours) = &mut region.detours else {
        return Ok(());
    };
    detours.enter(mem, tables).map_err(|source| {
        let at = KERNEL_WINDOW.start;
        let why = Refused::Slot { at, source };
        Obstacle { at, why }
    })
}

/// Records that the text at `at` holds `patch` now. Retires the jump that was there before. `past_int3s` has the
/// addresses that held one of our int3s at some time.
fn set_patch(
    at: Gva,
    patch: Patch,
    sites: &mut Sites,
    code: &mut OurCode,
    past_int3s: &mut Arc<FxHashSet<u64>>,
) {
    let Some(site) = sites.get_mut(&at) else {
        return;
    };
    let past_int3s = Arc::make_mut(past_int3s);
    if let Patch::Breakpoint = patch {
        past_int3s.insert(at.0);
    } else if let Patch::Jump(jump) = &patch {
        // The bytes of the jump at which a task may resume are int3s.
        let inside = (1..JUMP as u64).map(|n| at.wrapping_add(n));
        let landings = inside.filter(|at| jump.detour.resume(*at).is_some());
        past_int3s.extend(landings.map(|at| at.0));
    }
    if let Patch::Jump(jump) = std::mem::replace(&mut site.patch, patch) {
        code.retire_jump(at, jump);
    }
}

/// Gives the `sites` their new `slots`, and retires their old slots.
fn set_slots(slots: Vec<NewSlot>, sites: &mut Sites, code: &mut OurCode, mem: &dyn PhysMemory) {
    for (at, slot) in slots {
        if let Some(site) = sites.get_mut(&at) {
            let old = std::mem::replace(&mut site.slot, slot);
            if let Some(slot) = &slot {
                code.reclaim_slot(slot);
            }
            code.retire_slot(site.point.displaced, old, mem);
        }
    }
}

/// Detaches the leaving probes from their sites, and removes the sites that have neither probes nor a hook.
fn detach_leaving(probes: &Probes, sites: &mut Sites, code: &mut OurCode, mem: &dyn PhysMemory) {
    for site in sites.values_mut() {
        site.members.retain(|id| !probes.is_leaving(*id));
    }
    let is_empty = |site: &SiteState| site.members.is_empty() && site.internal.is_none();
    let empty: Vec<_> = sites.extract_if(.., |_, site| is_empty(site)).collect();
    for (_, site) in empty {
        code.retire_slot(site.point.displaced, site.slot, mem);
    }
}

/// Restores the real return addresses in frames of calls in flight of leaving probes. Applies only to frames that
/// return through the trampoline of `fixtures`. Returns these addresses: they are in callers, or are stubs of other
/// probes that share the frame.
fn restore_frames(
    probes: &Probes,
    shared: &mut Shared,
    fixtures: &Fixtures,
    tables: &PageTables,
    mem: &dyn PhysMemory,
    standing: &[Standing],
) -> Vec<Gva> {
    let mut sent_to = Vec::new();
    if !probes.leaving().any(|(_, probe)| probe.pool.is_some()) {
        return sent_to;
    }
    let trampoline = fixtures.trampoline();
    // A virtual CPU that has just returned to the trampoline still needs its call.
    let returning = |slot: Gva| {
        standing
            .iter()
            .any(|cpu| cpu.rip() == trampoline && cpu.rsp().wrapping_sub(8) == slot)
    };
    let restored = Arc::make_mut(&mut shared.restored_frames);
    shared.returns.calls.remove(
        |id| probes.is_leaving(id),
        |frame| {
            if returning(frame.slot) {
                return Fate::Keep;
            }
            let fate = restore_frame(frame, trampoline, tables, mem);
            if fate == Fate::Forget {
                restored.add(frame);
                sent_to.push(frame.ret);
            }
            fate
        },
    );
    sent_to
}

/// Removes the gate from the text if no int3 of ours can be hit: no site is armed, and no detour in which a task
/// may have been interrupted has an int3. Tasks may have been interrupted in the detours of retired jumps and of
/// the prepared `jumps`. Unmaps the hidden region if nothing of it is in use.
fn remove_idle_gate(
    jumps: &BTreeMap<Gva, Jump>,
    sites: &Sites,
    code: &mut OurCode,
    live: Option<&mut Live>,
    mem: &dyn PhysMemory,
) {
    let mut left = code.ghost_jumps.values().flatten().chain(jumps.values());
    let escapes = left.any(|jump| jump.detour.escape().is_some());
    if let Some(live) = live
        && !escapes
        && !sites.values().any(SiteState::is_armed)
    {
        remove_gate(live, mem);
    }
    if code.region.is_idle()
        && let Err(error) = code.region.unmap(mem)
    {
        warn!(%error, "the slots stay mapped");
    }
}

/// Returns the new patch of `site`, which is to be armed; `None` if the site keeps its patch. `prepared` is the
/// jump that was made for the site.
fn next_patch(rules: &Rules<'_>, site: &SiteState, prepared: Option<Jump>) -> Option<Patch> {
    match (&site.patch, prepared) {
        (_, Some(jump)) => Some(Patch::Jump(jump)),
        (Patch::Jump(_), None) if rules.keeps_jump(site) => None,
        (Patch::Breakpoint, None) => None,
        (Patch::None | Patch::Jump(_), None) => Some(Patch::Breakpoint),
    }
}

/// Returns the edit that makes the text of `site` hold `patch`. The text may include patches of other sites, which
/// get their `next` patches in the same change.
fn edit<'s>(
    sites: &'s Sites,
    site: &SiteState,
    patch: &Patch,
    next: &'s BTreeMap<Gva, &'s Patch>,
) -> Edit {
    let at = site.point.displaced.at();
    let (now, then) = (site.original(&site.patch), site.original(patch));
    let original = if now.len() > then.len() { now } else { then };
    Edit {
        at,
        from: patched(sites, at, original, |_, site| &site.patch),
        to: patched(sites, at, original, |at, site| {
            next.get(&at).copied().unwrap_or(&site.patch)
        }),
    }
}

/// Patches the #BP entry if this machine needs that, the entry is not patched yet, and sites are to be armed.
/// Without the patch no site can be armed.
fn plant_gate(live: &mut Live, text: &Text<'_>, arming: &[(Gva, Patch)]) -> Result<(), Obstacles> {
    let is_needed = !live.gate_planted && !arming.is_empty();
    let Some(gate) = live.gate.as_ref().filter(|_| is_needed) else {
        return Ok(());
    };
    if let Err(why) = text.plant_gate(gate) {
        let all = arming.iter().map(|(at, _)| Obstacle {
            at: *at,
            why: why.clone(),
        });
        return Obstacles::of(all).map_or(Ok(()), Err);
    }
    live.gate_planted = true;
    Ok(())
}

fn remove_gate(live: &mut Live, mem: &dyn PhysMemory) {
    let tables = &live.view.tables;
    if let Some(gate) = live.gate.as_ref().filter(|_| live.gate_planted)
        && !(Text { tables, mem }).remove_gate(gate)
    {
        warn!(at = %gate.at(), "the guest rewrote its #BP entry under our patch");
    }
    live.gate_planted = false;
}
