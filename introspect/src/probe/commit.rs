//! Makes guest text agree with the registry: one stop of the virtual CPUs, whole or not at all.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::SlotCode;
use hvprobe_arch::mem::PhysMemory;
use tracing::warn;

use super::ProbeId;
use super::patch::Text;
use super::plan::{Obstacle, Refused};
use super::registry::{Live, Place, Registry, SiteState};
use super::returns::vacate;
use super::table::{Counters, Internal, Member, Parts, ProbeTable, Returning, Role, Site};
use crate::calls::Fate;
use crate::world::{Standing, StopError, World};

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
        self.commit_timed(leaving, world).map(|_| ())
    }

    /// As [`Self::commit`]; returns for how long the virtual CPUs were stopped.
    pub(super) fn commit_timed(
        &mut self,
        leaving: &BTreeSet<ProbeId>,
        world: &dyn World,
    ) -> Result<Duration, CommitError> {
        if self.live.is_none() {
            return Ok(Duration::ZERO);
        }
        let mut result = Ok(());
        let stopped_for = world
            .stopped(&mut |mem, standing| {
                self.change(leaving, mem, standing)
                    .map_err(|obstacle| result = Err(CommitError::Site(obstacle)))
                    .ok()
            })
            .map_err(CommitError::Stop)?;
        result.map(|()| stopped_for)
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
        standing: &[Standing],
    ) -> Result<Arc<ProbeTable>, Obstacle> {
        let sites_where = |condition: &dyn Fn(&SiteState) -> bool| -> Vec<Gva> {
            let sites = self.sites.iter().filter(|(_, site)| condition(site));
            sites.map(|(at, _)| *at).collect()
        };
        let wanted = |site: &SiteState| self.is_wanted(site, leaving);
        let arming = sites_where(&|site| !site.armed && !site.gone && wanted(site));
        let disarming = sites_where(&|site| site.armed && !wanted(site));

        let slots = match self.arm(&arming, leaving, mem, standing) {
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
                let (displaced, old) = (site.displaced, std::mem::replace(&mut site.slot, code));
                if let Some(code) = &code {
                    self.revive(code);
                }
                self.let_go(displaced, old, mem);
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
        self.vacate_calls(leaving, mem, standing);
        self.tidy(mem);
        Ok(Arc::new(self.table(leaving)))
    }

    /// Whether `site` is to carry an int3.
    pub(super) fn is_wanted(&self, site: &SiteState, leaving: &BTreeSet<ProbeId>) -> bool {
        let mut members = site.members.iter();
        let left_to_ftrace = site.occupied || site.ftrace && self.ftrace_patches;
        self.switched_on
            && !left_to_ftrace
            && (site.internal.is_some() || members.any(|id| self.is_enabled(*id, leaving)))
    }

    /// Whether probe `id` takes part in hits.
    pub(super) fn is_enabled(&self, id: ProbeId, leaving: &BTreeSet<ProbeId>) -> bool {
        !leaving.contains(&id)
            && self
                .probes
                .get(&id)
                .is_some_and(|probe| !probe.spec.disabled)
    }

    /// Takes the slots that armed sites need now and have not, and plants the gate and the int3s of
    /// the sites `arming`; returns the slots. On error the sites' text is as it was and no slot is
    /// taken.
    fn arm(
        &mut self,
        arming: &[Gva],
        leaving: &BTreeSet<ProbeId>,
        mem: &dyn PhysMemory,
        standing: &[Standing],
    ) -> Result<Vec<(Gva, Option<SlotCode>)>, Obstacle> {
        let slots = self.take_slots(leaving, mem, standing)?;
        let (Some(live), Some(first)) = (&mut self.live, arming.first()) else {
            return Ok(slots);
        };
        let tables = live.view.tables;
        let text = Text {
            tables: &tables,
            mem,
        };
        let sites = arming
            .iter()
            .filter_map(|at| Some((*at, self.sites.get(at)?.displaced.bytes())));
        let armed = plant_gate(live, &text)
            .map_err(|why| Obstacle { at: *first, why })
            .and_then(|()| text.arm(sites));
        if let Err(obstacle) = armed {
            self.give_back(slots, mem);
            return Err(obstacle);
        }
        Ok(slots)
    }

    fn disarm(&mut self, disarming: &[Gva], mem: &dyn PhysMemory) {
        let Some(live) = &self.live else { return };
        let tables = &live.view.tables;
        for at in disarming {
            if let Some(site) = self.sites.get_mut(at) {
                site.armed = false;
                site.gone |= !Text { tables, mem }.disarm(*at, site.displaced.bytes());
            }
        }
    }

    /// Drops the `leaving` members, and sites nobody is left at.
    fn forget(&mut self, leaving: &BTreeSet<ProbeId>, mem: &dyn PhysMemory) {
        for site in self.sites.values_mut() {
            site.members.retain(|id| !leaving.contains(id));
        }
        let empty: Vec<_> = self
            .sites
            .extract_if(.., |_, site| {
                site.members.is_empty() && site.internal.is_none()
            })
            .collect();
        for (_, site) in empty {
            self.let_go(site.displaced, site.slot, mem);
        }
    }

    /// Lets calls in flight of the probes that leave return to their callers on their own.
    fn vacate_calls(
        &mut self,
        leaving: &BTreeSet<ProbeId>,
        mem: &dyn PhysMemory,
        standing: &[Standing],
    ) {
        let (Some(live), Some(fixtures)) = (&self.live, self.hidden.fixtures()) else {
            return;
        };
        let is_return = |id: &ProbeId| self.probes.get(id).is_some_and(|p| p.pool.is_some());
        if !leaving.iter().any(is_return) {
            return;
        }
        let trampoline = fixtures.trampoline();
        let tables = &live.view.tables;
        // A virtual CPU that has just returned there still needs its call.
        let returning = |slot: Gva| {
            standing
                .iter()
                .any(|cpu| cpu.rip == trampoline && cpu.rsp.wrapping_sub(8) == slot)
        };
        self.returns.calls.remove(
            |id| leaving.contains(&id),
            |frame| {
                if returning(frame.slot) {
                    Fate::Keep
                } else {
                    vacate(frame, trampoline, tables, mem)
                }
            },
        );
    }

    /// Takes the gate away while no int3 of ours can be reached: no site is armed and no call is to
    /// return through the trampoline. Takes the hidden region away while nothing of it is in use.
    fn tidy(&mut self, mem: &dyn PhysMemory) {
        let mut calls_in_flight = false;
        self.returns.calls.live(|_| calls_in_flight = true);
        if let Some(live) = &mut self.live
            && !calls_in_flight
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

    pub(super) fn table(&self, leaving: &BTreeSet<ProbeId>) -> ProbeTable {
        let sites = self
            .sites
            .values()
            .filter(|site| site.armed)
            .map(|site| Site {
                displaced: site.displaced,
                slot: site.slot,
                after_sti: site.after_sti,
                members: self.members(site, leaving),
            })
            .collect();
        let returning = self
            .probes
            .iter()
            .filter(|(id, probe)| probe.pool.is_some() && !leaving.contains(id))
            .map(|(id, probe)| {
                let returning = Returning {
                    counters: Arc::clone(&probe.counters),
                    actions: Arc::clone(&probe.actions),
                    disabled: probe.spec.disabled || !self.switched_on,
                };
                (*id, returning)
            })
            .collect();
        ProbeTable::new(Parts {
            sites,
            retired: Arc::clone(&self.retired),
            fixtures: self.hidden.fixtures(),
            returning,
            returns: Arc::clone(&self.returns),
        })
    }

    fn members(&self, site: &SiteState, leaving: &BTreeSet<ProbeId>) -> Box<[Member]> {
        let own = site
            .members
            .iter()
            .filter(|id| self.is_enabled(**id, leaving))
            .filter_map(|id| Some((id, self.probes.get(id)?)))
            .map(|(id, probe)| {
                let actions = Arc::clone(&probe.actions);
                Member {
                    id: *id,
                    counters: Arc::clone(&probe.counters),
                    role: match &probe.pool {
                        None => Role::Probe(actions),
                        Some(pool) => Role::Return {
                            actions,
                            pool: Arc::clone(pool),
                        },
                    },
                }
            });
        let internal = site.internal.map(|internal| Member {
            id: Internal::ID,
            counters: Arc::new(Counters::new(0)),
            role: Role::Internal(internal),
        });
        internal.into_iter().chain(own).collect()
    }

    /// Whether some return probe has a probepoint and is not about to leave.
    pub(super) fn has_return_probes(&self, leaving: &BTreeSet<ProbeId>) -> bool {
        self.probes.iter().any(|(id, probe)| {
            probe.pool.is_some() && !leaving.contains(id) && matches!(probe.place, Place::At(_))
        })
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
