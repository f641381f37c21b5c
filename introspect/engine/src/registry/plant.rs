//! Planting new probes in one stop of the virtual CPUs.
//!
//! ```text
//!                         before the stop       │           in the stop
//!   placed ─► fit ────► its detour is made ─────┼─► usable ─► text changed ─► planted
//!               │               │               │      │            │
//!               └───────────────┴───── refused ◄┴──────┴────────────┘
//! ```
//! A refused probe leaves its site at once, and the others go on without it. Invariants: with [`Refusals::Fail`]
//! the first refusal ends the whole operation; after an error, and for refused probes, the text is as before, and
//! slots, detours and instances are free again; the work grows only in proportion to the number of sites, even if
//! many probes are refused, because each attempt to change the text finds all obstacles together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::table::ProbeTable;
use hvprobe_spec::{Mechanism, ProbeId};

use crate::code::jump::Jump;
use crate::code::ours::OurCode;
use crate::code::scan::{AT_ONCE_MAX, Still};
use crate::refusal::{Obstacle, Obstacles, Refused};
use crate::registered::Refusals;
use crate::registry::optimize::Rules;
use crate::registry::place::detach;
use crate::registry::state::Registry;
use crate::sites::probes::Probes;
use crate::sites::site::{Patch, Placement, SiteState, Sites};
use crate::unoptimized::Unoptimized;
use crate::world::{StopError, World};

/// The result of planting new probes.
#[derive(Debug, Default)]
pub(crate) struct Planted {
    /// Refused probes, which are at no site. All others are planted.
    pub(crate) refused: Vec<(ProbeId, Refused)>,
    /// Time that the virtual CPUs were stopped.
    pub(crate) stopped_for: Duration,
}

/// Why none of the new probes was planted.
#[derive(Debug)]
pub(crate) enum PlantError {
    Stop(StopError),
    /// The guest runs another kernel.
    Replaced,
    /// This probe was refused, and with [`Refusals::Fail`] that ends the operation.
    Refused(ProbeId, Refused),
    /// This site cannot be armed, and leaving out new probes would not help or is not allowed.
    Site(Obstacle),
}

/// New probes in the process of planting.
struct Newcomers {
    refusals: Refusals,
    /// Probes not refused so far.
    left: BTreeSet<ProbeId>,
    refused: Vec<(ProbeId, Refused)>,
    /// Jumps that were prepared, by their sites.
    jumps: BTreeMap<Gva, Jump>,
}

impl Newcomers {
    /// Detaches `id` from its site, or ends the whole operation.
    fn refuse(
        &mut self,
        id: ProbeId,
        why: Refused,
        probes: &mut Probes,
        sites: &mut Sites,
    ) -> Result<(), PlantError> {
        match self.refusals {
            Refusals::Fail => Err(PlantError::Refused(id, why)),
            Refusals::Skip => {
                detach(id, probes, sites);
                self.left.remove(&id);
                self.refused.push((id, why));
                Ok(())
            }
        }
    }

    /// Returns the new probes that require a jump, with their sites.
    fn asking_for_jumps(&self, probes: &Probes) -> Vec<(ProbeId, Gva)> {
        let asks = |id: &ProbeId| {
            let probe = probes.get(*id)?;
            match probe.placement {
                Placement::At(at) if probe.spec.mechanism == Some(Mechanism::Optimized) => {
                    Some((*id, at))
                }
                _ => None,
            }
        };
        self.left.iter().filter_map(asks).collect()
    }
}

impl Registry {
    /// Arms the sites of the probes `new`, which were placed there but are not planted yet. Refused probes are
    /// detached from their sites; after an error, all of `new` are.
    ///
    /// Takes one stop, in which all other due changes are made too. Takes a second one if a probe refused in
    /// the first had prevented a jump near it. The second stop may fail: its changes are then made with the
    /// next change.
    ///
    /// # Errors
    /// When no probe was planted.
    pub(crate) fn plant(
        &mut self,
        new: &BTreeSet<ProbeId>,
        refusals: Refusals,
        world: &dyn World,
    ) -> Result<Planted, PlantError> {
        let mut on_their_way = Newcomers {
            refusals,
            left: new.clone(),
            refused: Vec::new(),
            jumps: BTreeMap::new(),
        };
        let stopped = self.plant_what_can_be(&mut on_their_way, world);
        let Newcomers {
            left,
            refused,
            jumps,
            ..
        } = on_their_way;
        let unplanted: BTreeSet<ProbeId> = match stopped {
            Ok(_) => new.difference(&left).copied().collect(),
            Err(_) => new.clone(),
        };
        for id in &unplanted {
            detach(*id, &mut self.probes, &mut self.sites);
        }
        release_unplanted(&unplanted, jumps, &mut self.code, world.memory());
        if !unplanted.is_empty() {
            self.provide_hooks(world.memory());
        }
        let mut stopped_for = stopped?;
        if !refused.is_empty() && self.live.is_some() && is_unsettled(&self.rules()) {
            let again = self.commit_timed(AT_ONCE_MAX, world);
            stopped_for += again.unwrap_or_default();
        }
        Ok(Planted {
            refused,
            stopped_for,
        })
    }

    fn plant_what_can_be(
        &mut self,
        new: &mut Newcomers,
        world: &dyn World,
    ) -> Result<Duration, PlantError> {
        if self.live.is_none() {
            return Ok(Duration::ZERO);
        }
        self.provide_hooks(world.memory());
        self.refuse_unfit(new)?;
        let made = self.prepare_jumps(world.memory());
        new.jumps.extend(made);
        self.refuse_denied(new)?;
        if !new.refused.is_empty() {
            self.provide_hooks(world.memory());
        }
        let mut look = self.look(&new.jumps, AT_ONCE_MAX, world);
        let mut armed = Ok(());
        let stopped = world.stopped(&mut |mem, standing| {
            if let Some(none) = self.forget_replaced(mem, standing) {
                return Some(none);
            }
            let seen = look.as_mut().and_then(|look| look.end(standing));
            let still = Still { standing, seen };
            self.retire_unusable(&mut new.jumps, mem, still);
            match self.arm(new, mem, still) {
                Ok(table) => Some(table),
                Err(why) => {
                    armed = Err(why);
                    None
                }
            }
        });
        drop(look);
        let stopped_for = stopped.map_err(PlantError::Stop)?;
        if self.replaced {
            self.drain_sources(world);
            return Err(PlantError::Replaced);
        }
        armed.map(|()| stopped_for)
    }

    /// Changes the text, leaving out those of the `new` probes that are refused on the way.
    fn arm(
        &mut self,
        new: &mut Newcomers,
        mem: &dyn PhysMemory,
        still: Still<'_>,
    ) -> Result<Arc<ProbeTable>, PlantError> {
        loop {
            // The loop ends, because every round has fewer new probes or fewer watched functions.
            let jumps = &mut new.jumps;
            let rules = self.rules();
            let suits = |at: &Gva, jump: &Jump| {
                let site = rules.sites.get(at);
                site.is_some_and(|site| rules.suits(site, jump))
            };
            let useless = jumps.extract_if(.., |at, jump| !suits(at, jump));
            let useless: Vec<_> = useless.collect();
            self.code.retire_jumps(useless);
            let before = new.refused.len();
            self.refuse_denied(new)?;
            if new.refused.len() > before {
                self.provide_hooks(mem);
            }
            match self.change(&mut new.jumps, mem, still) {
                Ok(table) => return Ok(table),
                Err(obstacles) => self.refuse_obstructed(new, obstacles, mem)?,
            }
        }
    }

    /// Refuses the probes that require a jump where none is possible.
    fn refuse_unfit(&mut self, new: &mut Newcomers) -> Result<(), PlantError> {
        for (id, at) in new.asking_for_jumps(&self.probes) {
            let site = self.sites.get(&at);
            let unfit = site.and_then(|site| self.rules().fit(site).err());
            if let Some(source) = unfit {
                let why = Refused::Unoptimized { at, source };
                new.refuse(id, why, &mut self.probes, &mut self.sites)?;
            }
        }
        Ok(())
    }

    /// Refuses the probes that require a jump and would get an int3.
    fn refuse_denied(&mut self, new: &mut Newcomers) -> Result<(), PlantError> {
        for (id, at) in new.asking_for_jumps(&self.probes) {
            let has_none = !new.jumps.contains_key(&at);
            let site = self.sites.get(&at).filter(|_| has_none);
            if let Some(source) = site.and_then(|site| denial(&self.rules(), site)) {
                let why = Refused::Unoptimized { at, source };
                new.refuse(id, why, &mut self.probes, &mut self.sites)?;
            }
        }
        Ok(())
    }

    /// Refuses the new probes at the sites that cannot be armed.
    fn refuse_obstructed(
        &mut self,
        new: &mut Newcomers,
        obstacles: Obstacles,
        mem: &dyn PhysMemory,
    ) -> Result<(), PlantError> {
        if new.refusals == Refusals::Fail {
            return Err(PlantError::Site(obstacles.first()));
        }
        let before = new.refused.len();
        let mut others = Vec::new();
        for obstacle in obstacles.all() {
            let Obstacle { at, why } = &obstacle;
            let members = self.sites.get(at).map(|site| site.members.as_slice());
            let members: Vec<_> = members.unwrap_or_default().to_vec();
            let here: Vec<_> = members
                .into_iter()
                .filter(|id| new.left.contains(id))
                .collect();
            if here.is_empty() {
                others.push(obstacle);
                continue;
            }
            for id in here {
                new.refuse(id, why.clone(), &mut self.probes, &mut self.sites)?;
            }
        }
        if new.refused.len() > before {
            // The engine may have watched the other sites only for the refused probes.
            self.provide_hooks(mem);
            return Ok(());
        }
        for obstacle in others {
            if !self.unhook(&obstacle) {
                return Err(PlantError::Site(obstacle));
            }
        }
        Ok(())
    }
}

/// Releases what was made for probes that were not planted, and retires the other `jumps`, which were not used. No
/// task has ever reached a detour that records for a probe that was not planted.
fn release_unplanted(
    unplanted: &BTreeSet<ProbeId>,
    jumps: BTreeMap<Gva, Jump>,
    code: &mut OurCode,
    mem: &dyn PhysMemory,
) {
    code.retire_jumps(jumps);
    if unplanted.is_empty() {
        return;
    }
    let mut never_used = Vec::new();
    let is_of_them = |jump: &mut Jump| jump.members.iter().any(|id| unplanted.contains(id));
    code.ghost_jumps.retain(|_, jumps| {
        never_used.extend(jumps.extract_if(.., is_of_them));
        !jumps.is_empty()
    });
    for id in unplanted {
        code.release_source(*id, mem);
    }
    if let Some(detours) = code.region.detours.as_mut() {
        for Jump { detour, .. } in never_used {
            detours.release(mem, detour.at(), detour.code().len() as u64);
        }
    }
}

/// Returns why `site`, for which no jump was made, will have an int3; `None` if it will not.
fn denial(rules: &Rules<'_>, site: &SiteState) -> Option<Unoptimized> {
    let is_denied = rules.is_wanted(site) && !rules.keeps_jump(site);
    is_denied.then(|| rules.without_jump(site))
}

/// Returns whether a site that has an int3 could have a jump now.
fn is_unsettled(rules: &Rules<'_>) -> bool {
    let could_jump = |site: &SiteState| {
        let breakpoint = matches!(site.patch, Patch::Breakpoint) && rules.is_wanted(site);
        breakpoint && site.unprepared.is_none() && rules.fit(site).is_ok()
    };
    let mut there = rules.sites.values().filter(|site| !site.gone);
    there.any(could_jump)
}
