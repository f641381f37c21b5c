//! Makes guest text agree with the registry: one stop of the virtual CPUs, whole or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, SlotCode};
use hvprobe_arch::mem::PhysMemory;
use tracing::warn;

use super::ProbeId;
use super::patch::Text;
use super::plan::{Obstacle, Refused};
use super::registry::{Live, Registry, SiteState};
use super::table::{Member, ProbeTable, Site};
use crate::hidden::{HiddenError, HiddenRegion};
use crate::world::{StopError, World};

/// Why a change did not happen.
#[derive(Debug)]
pub(super) enum CommitError {
    Stop(StopError),
    Site(Obstacle),
}

impl Registry {
    /// Makes the [`change`](Self::change) in one stop of the virtual CPUs, if there is text to be
    /// changed yet.
    pub(super) fn commit(
        &mut self,
        leaving: &BTreeSet<ProbeId>,
        world: &dyn World,
    ) -> Result<(), CommitError> {
        if self.live.is_none() {
            return Ok(());
        }
        let mut result = Ok(());
        world
            .stopped(&mut |mem, _| {
                self.change(leaving, mem)
                    .map_err(|obstacle| result = Err(CommitError::Site(obstacle)))
                    .ok()
            })
            .map_err(CommitError::Stop)?;
        result
    }

    /// Arms every site with an enabled probe, disarms every other, forgets the `leaving` probes at
    /// their sites and frees what nobody needs any more. Returns the table that matches the text.
    ///
    /// # Errors
    /// The site that could not be armed; then nothing has changed.
    pub(super) fn change(
        &mut self,
        leaving: &BTreeSet<ProbeId>,
        mem: &dyn PhysMemory,
    ) -> Result<Arc<ProbeTable>, Obstacle> {
        let probes = &self.probes;
        let wanted = |site: &SiteState| {
            site.members
                .iter()
                .any(|id| !leaving.contains(id) && probes.get(id).is_some_and(|p| !p.spec.disabled))
        };
        let sites_where = |condition: &dyn Fn(&SiteState) -> bool| -> Vec<Gva> {
            let sites = self.sites.iter().filter(|(_, site)| condition(site));
            sites.map(|(at, _)| *at).collect()
        };
        let arming = sites_where(&|site| !site.armed && !site.gone && wanted(site));
        let disarming = sites_where(&|site| site.armed && !wanted(site));

        let slots = match self.arm(&arming, mem) {
            Ok(slots) => slots,
            Err(obstacle) => {
                self.tidy(mem);
                return Err(obstacle);
            }
        };
        // Nothing below can fail.
        self.disarm(&disarming, mem);
        for (at, code) in slots {
            if let Some(site) = self.sites.get_mut(&at) {
                site.slot = Some(code);
            }
        }
        if !arming.is_empty() {
            let retired = Arc::make_mut(&mut self.retired);
            for at in arming {
                retired.insert(at.0);
                if let Some(site) = self.sites.get_mut(&at) {
                    site.armed = true;
                }
            }
        }
        self.forget(leaving, mem);
        self.tidy(mem);
        Ok(Arc::new(self.table(leaving)))
    }

    /// Takes slots for the sites of `arming` and plants the gate and their int3s; returns the
    /// slots. On error the sites' text is as it was and no slot is taken.
    fn arm(
        &mut self,
        arming: &[Gva],
        mem: &dyn PhysMemory,
    ) -> Result<Vec<(Gva, SlotCode)>, Obstacle> {
        let (Some(live), Some(first)) = (&mut self.live, arming.first()) else {
            return Ok(Vec::new());
        };
        let tables = live.view.tables;
        let text = Text {
            tables: &tables,
            mem,
        };
        let slots = take_slots(&self.sites, arming, &mut self.hidden, &text)?;
        let sites = arming
            .iter()
            .filter_map(|at| Some((*at, self.sites.get(at)?.displaced.bytes())));
        let armed = plant_gate(live, &text)
            .map_err(|why| Obstacle { at: *first, why })
            .and_then(|()| text.arm(sites));
        if let Err(obstacle) = armed {
            let codes = slots.into_iter().map(|(_, code)| code);
            release(&mut self.hidden, mem, codes);
            return Err(obstacle);
        }
        Ok(slots)
    }

    fn disarm(&mut self, disarming: &[Gva], mem: &dyn PhysMemory) {
        let Some(live) = &self.live else { return };
        let tables = &live.view.tables;
        for at in disarming {
            if let Some(site) = self.sites.get_mut(at)
                && let Some(original) = site.displaced.bytes().first()
            {
                site.armed = false;
                site.gone = !Text { tables, mem }.disarm(*at, *original);
            }
        }
    }

    /// Drops the `leaving` members, and sites nobody is left at.
    fn forget(&mut self, leaving: &BTreeSet<ProbeId>, mem: &dyn PhysMemory) {
        for site in self.sites.values_mut() {
            site.members.retain(|id| {
                let leaves = leaving.contains(id);
                site.faulted |= leaves
                    && self
                        .probes
                        .get(id)
                        .is_some_and(|probe| probe.counters.sum().faults > 0);
                !leaves
            });
        }
        for (_, site) in self.sites.extract_if(.., |_, site| site.members.is_empty()) {
            match site.slot {
                // A task may have been left inside the slot and come back to it any time.
                Some(code) if site.faulted => self.ghosts.push((site.displaced, code)),
                Some(code) => release(&mut self.hidden, mem, [code]),
                None => {}
            }
        }
    }

    /// Takes the gate away while no site is armed, and the hidden region while no slot is in use.
    fn tidy(&mut self, mem: &dyn PhysMemory) {
        if let Some(live) = &mut self.live
            && !self.sites.values().any(|site| site.armed)
        {
            remove_gate(live, mem);
        }
        if self.hidden.is_idle()
            && let Err(error) = self.hidden.unmap(mem)
        {
            warn!(%error, "the slots stay mapped");
        }
    }

    fn table(&self, leaving: &BTreeSet<ProbeId>) -> ProbeTable {
        let sites = self
            .sites
            .values()
            .filter(|site| site.armed)
            .map(|site| Site {
                displaced: site.displaced,
                slot: site.slot,
                members: site
                    .members
                    .iter()
                    .filter(|id| !leaving.contains(id))
                    .filter_map(|id| Some((id, self.probes.get(id)?)))
                    .filter(|(_, probe)| !probe.spec.disabled)
                    .map(|(id, probe)| Member {
                        id: *id,
                        counters: Arc::clone(&probe.counters),
                    })
                    .collect(),
            })
            .collect();
        let disarmed = self
            .sites
            .values()
            .filter(|site| !site.armed)
            .filter_map(|site| Some((&site.displaced, site.slot.as_ref()?)));
        let ghosts = self
            .ghosts
            .iter()
            .map(|(displaced, code)| (displaced, code))
            .chain(disarmed)
            .map(|(displaced, code)| Site {
                displaced: *displaced,
                slot: Some(*code),
                members: Box::default(),
            })
            .collect();
        ProbeTable::new(sites, ghosts, Arc::clone(&self.retired))
    }
}

/// Takes and fills a slot for every site of `arming` that is stepped and has none.
fn take_slots(
    sites: &BTreeMap<Gva, SiteState>,
    arming: &[Gva],
    hidden: &mut HiddenRegion,
    text: &Text<'_>,
) -> Result<Vec<(Gva, SlotCode)>, Obstacle> {
    let mut taken = Vec::new();
    for &at in arming {
        let Some(site) = sites.get(&at) else { continue };
        if site.slot.is_some() || !matches!(site.displaced.action(), Action::Step) {
            continue;
        }
        let slot = hidden
            .map(text.mem, text.tables)
            .and_then(|()| hidden.take(text.mem));
        let code = slot
            .map_err(|source| Refused::Slot { at, source })
            .and_then(|slot| {
                let code = site
                    .displaced
                    .relocate(slot)
                    .map_err(|source| Refused::Relocate { at, source })
                    .and_then(|code| {
                        hidden
                            .fill(text.mem, &code)
                            .map_err(|source| Refused::Slot { at, source })?;
                        Ok(code)
                    });
                if code.is_err() {
                    put_back(hidden.release(text.mem, slot));
                }
                code
            });
        match code {
            Ok(code) => taken.push((at, code)),
            Err(why) => {
                release(hidden, text.mem, taken.into_iter().map(|(_, code)| code));
                return Err(Obstacle { at, why });
            }
        }
    }
    Ok(taken)
}

fn release(
    hidden: &mut HiddenRegion,
    mem: &dyn PhysMemory,
    codes: impl IntoIterator<Item = SlotCode>,
) {
    for code in codes {
        put_back(hidden.release(mem, code.at()));
    }
}

fn put_back(result: Result<(), HiddenError>) {
    if let Err(error) = result {
        warn!(%error, "an out-of-line slot could not be given back");
    }
}

/// Patches the #BP entry, if this machine needs it and it is not patched yet.
fn plant_gate(live: &mut Live, text: &Text<'_>) -> Result<(), Refused> {
    if let Some(gate) = live.gate.as_ref().filter(|_| !live.gate_planted) {
        text.plant_gate(gate)?;
        live.gate_planted = true;
    }
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
