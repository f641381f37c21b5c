//! Makes guest text agree with the registry: one stop of the virtual CPUs, whole or not at all.

use std::collections::BTreeSet;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, SlotCode};
use hvprobe_arch::mem::PhysMemory;
use tracing::warn;

use super::ProbeId;
use super::patch::Text;
use super::plan::Refused;
use super::registry::{Live, Registry, SiteState};
use super::table::{Member, ProbeTable, Site};
use crate::hidden::{HiddenError, HiddenRegion};
use crate::world::{StopError, World};

/// Why a change did not happen.
#[derive(Debug)]
pub(super) enum CommitError {
    Stop(StopError),
    Site { at: Gva, why: Refused },
}

impl Registry {
    /// Arms every site with an enabled probe, disarms every other, forgets the `leaving` probes at
    /// their sites and frees what nobody needs any more.
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
            .stopped(&mut |mem| {
                self.change(leaving, mem)
                    .map_err(|error| result = Err(error))
                    .ok()
            })
            .map_err(CommitError::Stop)?;
        result
    }

    fn change(
        &mut self,
        leaving: &BTreeSet<ProbeId>,
        mem: &dyn PhysMemory,
    ) -> Result<Arc<ProbeTable>, CommitError> {
        let probes = &self.probes;
        let wanted = |site: &SiteState| {
            site.members
                .iter()
                .any(|id| !leaving.contains(id) && probes.get(id).is_some_and(|p| !p.spec.disabled))
        };
        let arming: Vec<Gva> = self
            .sites
            .iter()
            .filter(|(_, site)| !site.armed && !site.gone && wanted(site))
            .map(|(at, _)| *at)
            .collect();
        let disarming: Vec<Gva> = self
            .sites
            .iter()
            .filter(|(_, site)| site.armed && !wanted(site))
            .map(|(at, _)| *at)
            .collect();
        let Some(live) = &mut self.live else {
            return Ok(Arc::default());
        };
        let tables = live.view.tables;
        let text = Text {
            tables: &tables,
            mem,
        };

        let slots = take_slots(&self.sites, &arming, &mut self.hidden, &text)?;
        let gate_before = live.gate_planted;
        let armed = plant_gate(live, &text, arming.first().copied()).and_then(|()| {
            let sites = arming
                .iter()
                .filter_map(|at| Some((*at, self.sites.get(at)?.displaced.bytes())));
            text.arm(sites).map_err(site_error)
        });
        if let Err(error) = armed {
            if !gate_before {
                remove_gate(live, mem);
            }
            release(
                &mut self.hidden,
                mem,
                slots.into_iter().map(|(_, code)| code),
            );
            return Err(error);
        }

        // Nothing below can fail.
        for at in disarming {
            if let Some(site) = self.sites.get_mut(&at) {
                site.armed = false;
                let original = site.displaced.bytes().first().copied().unwrap_or(0x90);
                site.gone = !text.disarm(at, original);
            }
        }
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
        if !self.sites.values().any(|site| site.armed) {
            if let Some(live) = &mut self.live {
                remove_gate(live, mem);
            }
            if self.hidden.is_idle()
                && let Err(error) = self.hidden.unmap(mem)
            {
                warn!(%error, "the slots stay mapped");
            }
        }
        Ok(Arc::new(self.table(leaving)))
    }

    /// Drops the `leaving` members, and sites nobody is left at.
    fn forget(&mut self, leaving: &BTreeSet<ProbeId>, mem: &dyn PhysMemory) {
        let faulted = |site: &SiteState| {
            let probes = site.members.iter().filter_map(|id| self.probes.get(id));
            probes.map(|p| p.counters.sum().faults).sum::<u64>() > 0
        };
        let mut empty = Vec::new();
        for (at, site) in &mut self.sites {
            let faulted = faulted(site);
            site.members.retain(|id| !leaving.contains(id));
            if site.members.is_empty() {
                empty.push((*at, faulted));
            }
        }
        for (at, faulted) in empty {
            let Some(site) = self.sites.remove(&at) else {
                continue;
            };
            match site.slot {
                // A task may have been left inside the slot and come back to it any time.
                Some(code) if faulted => self.ghosts.push((site.displaced, code)),
                Some(code) => release(&mut self.hidden, mem, [code]),
                None => {}
            }
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

fn site_error(why: Refused) -> CommitError {
    let at = match &why {
        Refused::TextChanged { at } | Refused::Unmapped { at } => *at,
        _ => Gva(0),
    };
    CommitError::Site { at, why }
}

/// Takes and fills a slot for every site of `arming` that is stepped and has none.
fn take_slots(
    sites: &std::collections::BTreeMap<Gva, SiteState>,
    arming: &[Gva],
    hidden: &mut HiddenRegion,
    text: &Text<'_>,
) -> Result<Vec<(Gva, SlotCode)>, CommitError> {
    let mut taken = Vec::new();
    for &at in arming {
        let Some(site) = sites.get(&at) else { continue };
        if site.slot.is_some() || !matches!(site.displaced.action(), Action::Step) {
            continue;
        }
        let slot = hidden
            .map(text.mem, text.tables)
            .and_then(|()| hidden.take());
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
                return Err(CommitError::Site { at, why });
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

/// Patches the #BP entry, if this machine needs it and anything is to be armed.
fn plant_gate(live: &mut Live, text: &Text<'_>, first: Option<Gva>) -> Result<(), CommitError> {
    let (Some(at), Some(gate), false) = (first, &live.gate, live.gate_planted) else {
        return Ok(());
    };
    text.plant_gate(gate)
        .map_err(|why| CommitError::Site { at, why })?;
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
