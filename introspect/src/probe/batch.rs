//! Registering a batch: what its definitions stand for, whole or as far as possible, in one stop.
//!
//! Invariants: everything that can be refused by looking at the guest is refused before the virtual
//! CPUs are stopped; with [`Refusals::Fail`] nothing has changed after an error, with
//! [`Refusals::Skip`] a probe is either registered or among those skipped, with the reason.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;

use super::commit::CommitError;
use super::glob::BATCH_MAX;
use super::jump::Jump;
use super::plan::{Obstacle, Probepoint, Refused};
use super::registry::{ChangeError, RegisterError, Registry};
use super::table::ProbeTable;
use super::{ProbeId, ProbeSpec};
use crate::definition::Target;
use crate::world::{Standing, StopError, World};

/// What becomes of a batch when a probe of it is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refusals {
    /// None of it is registered.
    #[default]
    Fail,
    /// The rest is registered.
    Skip,
}

/// A batch that was registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// The new probes with the positions in the batch of what they come from, in that order. A
    /// pattern's come in the order of their addresses.
    pub probes: Vec<(usize, ProbeId)>,
    /// What was refused, in the order of the batch. Empty with [`Refusals::Fail`].
    pub skipped: Vec<Skipped>,
    /// For how long the virtual CPUs were stopped, from the request to stop until the last was let
    /// go; zero when they were not.
    pub stopped_for: Duration,
}

impl Registered {
    /// The ids of the new probes.
    #[must_use]
    pub fn ids(&self) -> Vec<ProbeId> {
        self.probes.iter().map(|(_, id)| *id).collect()
    }
}

/// A probe that was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{target}")]
pub struct Skipped {
    /// The position in the batch of what it comes from.
    pub index: usize,
    /// Its own definition, which names one place unless that was refused as a whole.
    pub definition: String,
    /// What was to be probed: the symbol, `module:symbol`, address or pattern.
    pub target: String,
    /// Why not.
    #[source]
    pub why: Refused,
}

impl Skipped {
    fn new(index: usize, spec: &ProbeSpec, why: Refused) -> Self {
        Self {
            index,
            definition: spec.definition.to_string(),
            target: spec.definition.target.to_string(),
            why,
        }
    }
}

/// A probe that nothing speaks against yet.
struct Candidate<'s> {
    index: usize,
    spec: Cow<'s, ProbeSpec>,
    /// `None` for one that waits for its module.
    point: Option<Probepoint>,
}

impl Registry {
    /// Registers `specs`, all or none, in one stop of the virtual CPUs. While the guest boots the
    /// probes are checked against the kernel image and stay pending; so do probes of modules that
    /// are not loaded. A pattern stands for the functions that match now.
    ///
    /// # Errors
    /// Names the first probe that was refused and why; nothing has changed then.
    pub fn register(
        &mut self,
        specs: &[ProbeSpec],
        world: &dyn World,
    ) -> Result<Vec<ProbeId>, RegisterError> {
        Ok(self.register_batch(specs, Refusals::Fail, world)?.ids())
    }

    /// As [`Registry::register`], with a say in what becomes of the rest when one is refused.
    ///
    /// # Errors
    /// With [`Refusals::Fail`] as [`Registry::register`]; with [`Refusals::Skip`] when what a probe
    /// is to do makes no sense, or the virtual CPUs cannot be stopped.
    pub fn register_batch(
        &mut self,
        specs: &[ProbeSpec],
        refusals: Refusals,
        world: &dyn World,
    ) -> Result<Registered, RegisterError> {
        for (index, spec) in specs.iter().enumerate() {
            spec.check().map_err(|source| RegisterError::Spec {
                index,
                definition: spec.definition.to_string(),
                source,
            })?;
        }
        if specs.iter().any(|spec| self.may_be_of_a_module(spec)) {
            self.read_modules(world.memory());
        }
        self.read_kprobes(world.memory());
        let (candidates, mut skipped) = self.candidates(specs, refusals, world.memory())?;
        let mut probes = Vec::with_capacity(candidates.len());
        let mut planted = Vec::with_capacity(candidates.len());
        for Candidate { index, spec, point } in candidates {
            let at = point.as_ref().map(|point| point.displaced.at());
            match self.add(&spec, point) {
                Ok(id) => {
                    probes.push((index, id));
                    planted.push((index, spec, at));
                }
                Err(why) if refusals == Refusals::Skip => {
                    skipped.push(Skipped::new(index, &spec, why));
                }
                Err(source) => {
                    self.take_back(&ids_of(&probes), world);
                    return Err(refused(index, &spec, source));
                }
            }
        }
        self.provide_internal(&BTreeSet::new(), world.memory());
        while let Some((place, why)) = self.unfulfilled(&ids_of(&probes)) {
            let (index, spec, _) = planted.remove(place);
            if refusals == Refusals::Fail {
                self.take_back(&ids_of(&probes), world);
                return Err(refused(index, &spec, why));
            }
            let (_, id) = probes.remove(place);
            self.take_back(&[id], world);
            skipped.push(Skipped::new(index, &spec, why));
        }
        let stopped_for = match refusals {
            Refusals::Fail => {
                self.commit_timed(&BTreeSet::new(), world)
                    .map_err(|error| {
                        self.take_back(&ids_of(&probes), world);
                        match error {
                            CommitError::Stop(error) => error.into(),
                            CommitError::Site(Obstacle { at, why }) => {
                                // An obstacle to what the engine watches is laid to the first.
                                let mut here = planted.iter().filter(|(_, spec, place)| {
                                    !spec.disabled && *place == Some(at)
                                });
                                match here.next().or(planted.first()) {
                                    Some((index, spec, _)) => refused(*index, spec, why),
                                    None => RegisterError::Unplanted { source: why },
                                }
                            }
                        }
                    })?
            }
            Refusals::Skip => {
                let new: BTreeSet<ProbeId> = probes.iter().map(|(_, id)| *id).collect();
                let (late, stopped_for) = match self.commit_what_can_be(&new, world) {
                    Ok(done) => done,
                    Err(error) => {
                        self.take_back(&ids_of(&probes), world);
                        return Err(error);
                    }
                };
                for ((index, id), (_, spec, _)) in probes.iter().zip(&planted) {
                    if let Some((_, why)) = late.iter().find(|(other, _)| other == id) {
                        skipped.push(Skipped::new(*index, spec, why.clone()));
                    }
                }
                let late: BTreeSet<ProbeId> = late.into_iter().map(|(id, _)| id).collect();
                self.take_back(&late.iter().copied().collect::<Vec<_>>(), world);
                probes.retain(|(_, id)| !late.contains(id));
                stopped_for
            }
        };
        for (id, why) in self.denied(&ids_of(&probes)) {
            let Some(place) = probes.iter().position(|(_, other)| *other == id) else {
                continue;
            };
            let (index, _) = probes[place];
            let spec = self.probes.get(&id).map(|probe| probe.spec.clone());
            let Some(spec) = spec else { continue };
            if refusals == Refusals::Fail {
                self.give_up(&ids_of(&probes), world)?;
                return Err(refused(index, &spec, why));
            }
            self.give_up(&[id], world)?;
            probes.remove(place);
            skipped.push(Skipped::new(index, &spec, why));
        }
        skipped.sort_by_key(|skipped| skipped.index);
        Ok(Registered {
            probes,
            skipped,
            stopped_for,
        })
    }

    /// Unregisters probes that were planted, but not as they were to be.
    fn give_up(&mut self, ids: &[ProbeId], world: &dyn World) -> Result<(), StopError> {
        match self.unregister(ids, world) {
            Err(ChangeError::Stop(error)) => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// What `specs` stand for, as far as nothing speaks against it, and what else there is.
    fn candidates<'s>(
        &self,
        specs: &'s [ProbeSpec],
        refusals: Refusals,
        mem: &dyn PhysMemory,
    ) -> Result<(Vec<Candidate<'s>>, Vec<Skipped>), RegisterError> {
        let mut candidates: Vec<Candidate<'s>> = Vec::with_capacity(specs.len());
        let mut skipped = Vec::new();
        for (index, spec) in specs.iter().enumerate() {
            let room = BATCH_MAX.saturating_sub(candidates.len() + skipped.len());
            let singles = match self.singles(spec, room) {
                Ok(singles) => singles,
                Err(why) if refusals == Refusals::Skip => {
                    skipped.push(Skipped::new(index, spec, why));
                    continue;
                }
                Err(why) => return Err(refused(index, spec, why)),
            };
            let (functions, before) = (singles.len(), skipped.len());
            for single in singles {
                let point = match self.plan(&single, mem) {
                    Ok(point) => Some(point),
                    Err(Refused::ModuleNotLoaded { .. }) => None,
                    Err(why) => {
                        skipped.push(Skipped::new(index, &single, why));
                        continue;
                    }
                };
                candidates.push(Candidate {
                    index,
                    spec: single,
                    point,
                });
            }
            if refusals == Refusals::Skip {
                continue;
            }
            let count = skipped.len() - before;
            let Some(first) = skipped.drain(before..).next() else {
                continue;
            };
            let is_pattern = matches!(spec.definition.target, Target::Functions { .. });
            return Err(if is_pattern {
                RegisterError::SomeRefused {
                    index,
                    definition: spec.definition.to_string(),
                    count,
                    functions,
                    first: Box::new(first),
                }
            } else {
                refused(index, spec, first.why)
            });
        }
        Ok((candidates, skipped))
    }

    /// Arms what can be armed of the `new` probes; returns which cannot, and for how long the
    /// virtual CPUs were stopped.
    fn commit_what_can_be(
        &mut self,
        new: &BTreeSet<ProbeId>,
        world: &dyn World,
    ) -> Result<(Vec<(ProbeId, Refused)>, Duration), RegisterError> {
        if self.live.is_none() {
            return Ok((Vec::new(), Duration::ZERO));
        }
        let mut refused = Vec::new();
        let mut failure = None;
        let mut jumps = self.prepare_jumps(&BTreeSet::new(), world.memory());
        let stopped_for = world.stopped(&mut |mem, standing| {
            let jumps = std::mem::take(&mut jumps);
            self.change_what_can_be(new, jumps, &mut refused, mem, standing)
                .map_err(|obstacle| failure = Some(obstacle.why))
                .ok()
        })?;
        match failure {
            Some(source) => Err(RegisterError::Unplanted { source }),
            None => Ok((refused, stopped_for)),
        }
    }

    /// As [`Registry::change`] with the `jumps` that were prepared, taking those of the `new` probes out again that are in its way;
    /// they are added to `refused`.
    ///
    /// # Errors
    /// What is left in the way is no new probe's.
    pub(super) fn change_what_can_be(
        &mut self,
        new: &BTreeSet<ProbeId>,
        mut jumps: Vec<(Gva, Jump)>,
        refused: &mut Vec<(ProbeId, Refused)>,
        mem: &dyn PhysMemory,
        standing: &[Standing],
    ) -> Result<Arc<ProbeTable>, Obstacle> {
        loop {
            let obstacle = match self.change(&BTreeSet::new(), jumps, mem, standing) {
                Ok(table) => return Ok(table),
                Err(obstacle) => obstacle,
            };
            // Every round has fewer new probes, or one site less.
            let at = obstacle.at;
            let Some(site) = self.sites.get_mut(&at) else {
                return Err(obstacle);
            };
            let in_the_way = site.members.extract_if(.., |id| new.contains(id));
            let before = refused.len();
            refused.extend(in_the_way.map(|id| (id, obstacle.why.clone())));
            if !site.is_armed() && (site.members.is_empty() || refused.len() == before) {
                self.sites.remove(&at);
            } else if refused.len() == before {
                return Err(obstacle);
            }
            jumps = self.prepare_jumps(&BTreeSet::new(), mem);
        }
    }
}

fn ids_of(probes: &[(usize, ProbeId)]) -> Vec<ProbeId> {
    probes.iter().map(|(_, id)| *id).collect()
}

fn refused(index: usize, spec: &ProbeSpec, source: Refused) -> RegisterError {
    RegisterError::Refused {
        index,
        definition: spec.definition.to_string(),
        source,
    }
}
