//! The registry: which probes exist, where they are planted, and every change to that.
//!
//! ```text
//!             register                    text final                 unregister
//!  (booting) ──────────► pending ───────────────────► placed ──────────────────► forgotten
//!                            └─────► refused             │ ▲
//!  (live)    ──────────────────────────────────► placed ◄┘ │ enable / disable
//! ```
//! A *site* is one address with the probes at it, in the order of their registration; it carries
//! our int3 exactly while one of them is enabled. Invariants: a batch is registered whole or not at
//! all and costs one stop of the virtual CPUs; text is written only in that stop; the virtual CPUs
//! leave the stop with a table that matches the text.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, Displaced, GateHead, SlotCode};
use hvprobe_arch::mem::PhysMemory;
use rustc_hash::FxHashSet;

use super::commit::CommitError;
use super::hit::KernelView;
use super::patch::{LiveText, Text};
use super::plan::{ImageText, Obstacle, Probepoint, Refused, plan};
use super::table::Counters;
use super::{Mechanism, ProbeId, ProbeInfo, ProbeSpec, ProbeState};
use crate::definition::{Definition, Target};
use crate::hidden::HiddenRegion;
use crate::image::KernelImage;
use crate::world::{StopError, World};

/// Why a batch was not registered. None of its probes is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// One probe of the batch was refused.
    #[error("probe {index} ({definition})")]
    Refused {
        /// Its position in the batch, from 0.
        index: usize,
        /// Its definition.
        definition: String,
        /// Why.
        #[source]
        source: Refused,
    },
    /// The virtual CPUs could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
}

/// Why a change of registered probes failed. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// No probe has this id.
    #[error("there is no probe {id} (index {index})")]
    NoSuchProbe {
        /// The id.
        id: ProbeId,
        /// Its position in the list given.
        index: usize,
    },
    /// A probe could not be armed.
    #[error("probe {id} cannot be armed")]
    Refused {
        /// The id.
        id: ProbeId,
        /// Why.
        #[source]
        source: Refused,
    },
    /// The virtual CPUs could not be stopped.
    #[error(transparent)]
    Stop(#[from] StopError),
}

#[derive(Debug)]
pub(super) struct Probe {
    pub(super) spec: ProbeSpec,
    pub(super) counters: Arc<Counters>,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Pending,
    Refused(Refused),
    At(Gva),
}

#[derive(Debug)]
pub(super) struct SiteState {
    symbol: (String, u64),
    pub(super) displaced: Displaced,
    pub(super) slot: Option<SlotCode>,
    pub(super) members: Vec<ProbeId>,
    pub(super) armed: bool,
    /// The guest rewrote our byte.
    pub(super) gone: bool,
    /// A probe that has left counted a fault here, so the guest may still return to the slot, which
    /// is never given back.
    pub(super) faulted: bool,
}

/// What a live kernel offers.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) view: KernelView,
    /// The #BP entry to patch while probes are armed, in the `idt-gate` catch mode.
    pub(super) gate: Option<GateHead>,
    pub(super) gate_planted: bool,
}

/// The probes of one machine.
#[derive(Debug)]
pub struct Registry {
    image: Arc<KernelImage>,
    vcpus: usize,
    next_id: u32,
    pub(super) probes: BTreeMap<ProbeId, Probe>,
    pub(super) sites: BTreeMap<Gva, SiteState>,
    /// Sites without probes whose slot the guest may still return to.
    pub(super) ghosts: Vec<(Displaced, SlotCode)>,
    pub(super) retired: Arc<FxHashSet<u64>>,
    pub(super) hidden: HiddenRegion,
    pub(super) live: Option<Live>,
}

impl Registry {
    /// An empty registry for a machine with `vcpus` virtual CPUs that is about to boot `image`.
    #[must_use]
    pub fn new(image: Arc<KernelImage>, vcpus: usize, hidden: HiddenRegion) -> Self {
        Self {
            image,
            vcpus,
            next_id: 1,
            probes: BTreeMap::new(),
            sites: BTreeMap::new(),
            ghosts: Vec::new(),
            retired: Arc::default(),
            hidden,
            live: None,
        }
    }

    /// The kernel's text is final: plants what was pending, in one stop. What turns out to be
    /// impossible is marked as refused and returned; the rest is planted.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped; then everything is pending as before.
    pub fn go_live(
        &mut self,
        view: KernelView,
        gate: Option<GateHead>,
        world: &dyn World,
    ) -> Result<Vec<(ProbeId, Refused)>, StopError> {
        self.live = Some(Live {
            view,
            gate,
            gate_planted: false,
        });
        let pending: Vec<ProbeId> = self
            .probes
            .iter()
            .filter(|(_, probe)| matches!(probe.place, Place::Pending))
            .map(|(id, _)| *id)
            .collect();
        let mut refused = Vec::new();
        for id in pending {
            match self.plan(&self.probes[&id].spec.definition.target, world.memory()) {
                Ok(point) => self.place(id, point),
                Err(why) => refused.push((id, why)),
            }
        }
        let stopped = world.stopped(&mut |mem, _| {
            loop {
                match self.change(&BTreeSet::new(), mem) {
                    Ok(table) => return Some(table),
                    Err(Obstacle { at, why }) => {
                        // Every round has one site less.
                        let site = self.sites.remove(&at)?;
                        refused.extend(site.members.into_iter().map(|id| (id, why.clone())));
                    }
                }
            }
        });
        if let Err(error) = stopped {
            for id in self.probes.keys().copied().collect::<Vec<_>>() {
                self.unplace(id);
            }
            self.live = None;
            return Err(error);
        }
        for (id, why) in &refused {
            if let Some(probe) = self.probes.get_mut(id) {
                probe.place = Place::Refused(why.clone());
            }
        }
        Ok(refused)
    }

    /// Registers `specs`, all or none, in one stop of the virtual CPUs. While the guest boots the
    /// probes are checked against the kernel image and stay pending.
    ///
    /// # Errors
    /// Names the first probe that was refused and why; nothing has changed then.
    pub fn register(
        &mut self,
        specs: &[ProbeSpec],
        world: &dyn World,
    ) -> Result<Vec<ProbeId>, RegisterError> {
        let refused = |index: usize, source| RegisterError::Refused {
            index,
            definition: specs[index].definition.to_string(),
            source,
        };
        let points = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| {
                self.plan(&spec.definition.target, world.memory())
                    .map_err(|why| refused(index, why))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let addresses: Vec<Gva> = points.iter().map(|p| p.displaced.at()).collect();
        let mut ids = Vec::with_capacity(specs.len());
        for (spec, point) in specs.iter().zip(points) {
            let id = ProbeId(self.next_id);
            self.next_id = self.next_id.saturating_add(1);
            self.probes.insert(
                id,
                Probe {
                    spec: spec.clone(),
                    counters: Arc::new(Counters::new(self.vcpus)),
                    place: Place::Pending,
                },
            );
            if self.live.is_some() {
                self.place(id, point);
            }
            ids.push(id);
        }
        self.commit(&BTreeSet::new(), world).map_err(|error| {
            for id in &ids {
                self.unplace(*id);
                self.probes.remove(id);
            }
            match error {
                CommitError::Stop(error) => error.into(),
                CommitError::Site(Obstacle { at, why }) => {
                    let index = specs
                        .iter()
                        .zip(&addresses)
                        .position(|(spec, address)| !spec.disabled && *address == at);
                    refused(index.unwrap_or(0), why)
                }
            }
        })?;
        Ok(ids)
    }

    /// Unregisters `ids`, all or none. When it returns, the original bytes are back and no virtual
    /// CPU is in a handler or slot of these probes.
    ///
    /// # Errors
    /// When one of them does not exist or the virtual CPUs cannot be stopped.
    pub fn unregister(&mut self, ids: &[ProbeId], world: &dyn World) -> Result<(), ChangeError> {
        let mut leaving = BTreeSet::new();
        for (index, &id) in ids.iter().enumerate() {
            if !self.probes.contains_key(&id) || !leaving.insert(id) {
                return Err(ChangeError::NoSuchProbe { id, index });
            }
        }
        self.commit(&leaving, world)
            .map_err(|error| self.change_error(error, ids))?;
        for id in &leaving {
            self.probes.remove(id);
        }
        Ok(())
    }

    /// Unregisters everything.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn unregister_all(&mut self, world: &dyn World) -> Result<(), ChangeError> {
        let all: Vec<ProbeId> = self.probes.keys().copied().collect();
        self.unregister(&all, world)
    }

    /// Enables or disables `ids`, all or none.
    ///
    /// # Errors
    /// When one of them does not exist, cannot be armed, or the virtual CPUs cannot be stopped.
    pub fn set_enabled(
        &mut self,
        ids: &[ProbeId],
        enabled: bool,
        world: &dyn World,
    ) -> Result<(), ChangeError> {
        for (index, &id) in ids.iter().enumerate() {
            if !self.probes.contains_key(&id) {
                return Err(ChangeError::NoSuchProbe { id, index });
            }
        }
        let mut before = BTreeMap::new();
        for id in ids {
            if let Some(probe) = self.probes.get_mut(id) {
                before.entry(*id).or_insert(probe.spec.disabled);
                probe.spec.disabled = !enabled;
            }
        }
        self.commit(&BTreeSet::new(), world).map_err(|error| {
            for (id, disabled) in before {
                if let Some(probe) = self.probes.get_mut(&id) {
                    probe.spec.disabled = disabled;
                }
            }
            self.change_error(error, ids)
        })
    }

    /// Every registered probe, in the order of registration.
    #[must_use]
    pub fn list(&self, mem: &dyn PhysMemory) -> Vec<ProbeInfo> {
        self.probes
            .iter()
            .map(|(id, probe)| self.info(*id, probe, mem))
            .collect()
    }

    fn info(&self, id: ProbeId, probe: &Probe, mem: &dyn PhysMemory) -> ProbeInfo {
        let site = match probe.place {
            Place::At(at) => self.sites.get(&at),
            _ => None,
        };
        let rewritten = site.is_some_and(|site| self.is_rewritten(site, mem));
        ProbeInfo {
            id,
            name: event_name(&probe.spec.definition),
            definition: probe.spec.definition.to_string(),
            addr: site.map(|site| site.displaced.at()),
            symbol: site.map(|site| site.symbol.clone()),
            state: match &probe.place {
                Place::Pending => ProbeState::Pending,
                Place::Refused(why) => ProbeState::Refused(why.to_string()),
                Place::At(_) if rewritten => ProbeState::Gone,
                Place::At(_) => ProbeState::Placed,
            },
            disabled: probe.spec.disabled,
            mechanism: site.map(|site| mechanism(&site.displaced)),
            counts: probe.counters.sum(),
        }
    }

    /// Whether the guest has put something else where `site`'s instruction was.
    fn is_rewritten(&self, site: &SiteState, mem: &dyn PhysMemory) -> bool {
        let Some(live) = &self.live else { return false };
        let tables = &live.view.tables;
        let text = Text { tables, mem };
        let at = site.displaced.at();
        let as_left = if site.armed {
            text.is_patched(at)
        } else {
            text.holds(at, site.displaced.bytes())
        };
        site.gone || !as_left
    }

    fn plan(&self, target: &Target, mem: &dyn PhysMemory) -> Result<Probepoint, Refused> {
        match &self.live {
            None => plan(target, &self.image, &ImageText(&self.image)),
            Some(live) => {
                let tables = &live.view.tables;
                let text = LiveText {
                    text: Text { tables, mem },
                    displaced: |at| {
                        let site = self.sites.get(&at).filter(|site| site.armed)?;
                        site.displaced.bytes().first().copied()
                    },
                };
                let point = plan(target, &self.image, &text)?;
                let at = point.displaced.at();
                match self.sites.get(&at) {
                    Some(site) if self.is_rewritten(site, mem) => Err(Refused::Rewritten { at }),
                    _ => Ok(point),
                }
            }
        }
    }

    fn place(&mut self, id: ProbeId, point: Probepoint) {
        let at = point.displaced.at();
        self.sites
            .entry(at)
            .or_insert_with(|| {
                let ghost = self.ghosts.iter().position(|(d, _)| *d == point.displaced);
                let slot = ghost.map(|n| self.ghosts.swap_remove(n).1);
                SiteState {
                    symbol: point.symbol,
                    displaced: point.displaced,
                    slot,
                    members: Vec::new(),
                    armed: false,
                    gone: false,
                    faulted: slot.is_some(),
                }
            })
            .members
            .push(id);
        if let Some(probe) = self.probes.get_mut(&id) {
            probe.place = Place::At(at);
        }
    }

    /// Takes back a [`Registry::place`] that was not committed.
    fn unplace(&mut self, id: ProbeId) {
        let Some(Place::At(at)) = self.probes.get(&id).map(|p| p.place.clone()) else {
            return;
        };
        if let Some(site) = self.sites.get_mut(&at) {
            site.members.retain(|member| *member != id);
            if site.members.is_empty() {
                // Before it was committed, it can have no other slot than a ghost's.
                let ghost = site.slot.map(|code| (site.displaced, code));
                self.ghosts.extend(ghost);
                self.sites.remove(&at);
            }
        }
        if let Some(probe) = self.probes.get_mut(&id) {
            probe.place = Place::Pending;
        }
    }

    /// Lays `error` to the charge of the one of `ids` that is at the site concerned.
    fn change_error(&self, error: CommitError, ids: &[ProbeId]) -> ChangeError {
        match error {
            CommitError::Stop(error) => error.into(),
            CommitError::Site(Obstacle { at, why }) => ChangeError::Refused {
                id: self
                    .sites
                    .get(&at)
                    .and_then(|site| site.members.iter().find(|id| ids.contains(id)))
                    .copied()
                    .unwrap_or(ProbeId(0)),
                source: why,
            },
        }
    }
}

fn mechanism(displaced: &Displaced) -> Mechanism {
    match displaced.action() {
        Action::Emulate(_) => Mechanism::Emulated,
        Action::Step => Mechanism::Stepped,
    }
}

/// The event's name as ftrace would make it: `p_SYMBOL_OFFSET`, with `_` for what an event name
/// cannot hold (`__trace_kprobe_create` in kernel/trace/trace_kprobe.c).
fn event_name(definition: &Definition) -> String {
    if let Some(name) = &definition.name {
        return name.clone();
    }
    match &definition.target {
        Target::Symbol { name, offset } => format!("p_{}_{offset}", name.replace('.', "_")),
        Target::Address(at) => format!("p_{at:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::parse;

    #[test]
    fn probes_without_a_name_are_named_as_ftrace_would() {
        for (definition, name) in [
            ("p vfs_read", "p_vfs_read_0"),
            ("p vfs_read+0x11", "p_vfs_read_17"),
            ("p foo.isra.0.cold+16", "p_foo_isra_0_cold_16"),
            ("p 0xffffffff81000109", "p_0xffffffff81000109"),
            ("p:mine vfs_read", "mine"),
            ("p:group/mine vfs_read", "group/mine"),
        ] {
            assert_eq!(event_name(&parse(definition).unwrap()), name);
        }
    }
}
