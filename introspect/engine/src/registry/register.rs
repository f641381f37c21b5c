//! Registration of a batch: whole or as far as possible, in one stop.
//!
//! ```text
//!   definitions ─ expand ─► one place each ─ plan ─► probepoints ─ place ─► at their sites ─ plant ─► registered
//! ```
//! Each step takes the batch from the previous one, and passes on the probes that it did not refuse. Invariants:
//! everything that can be refused by looking at the guest is refused before the virtual CPUs are stopped; after an
//! error nothing has changed; with [`Refusals::Skip`] a probe is either registered or among the skipped ones, with
//! the reason; the work grows only in proportion to the length of the batch, even if many of its probes are refused
//! ([`super::plant`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_spec::definition::Target;
use hvprobe_spec::{ProbeId, ProbeSpec};

use super::expand::singles;
use super::live_plan::find_probepoint;
use super::place::{create, detach, place};
use super::plant::{PlantError, Planted};
use crate::error::RegisterError;
use crate::plan::arguments::{Resolved, resolve};
use crate::plan::probepoint::Probepoint;
use crate::refusal::{Obstacle, Refused};
use crate::registered::{BATCH_MAX, Refusals, Registered, Skipped};
use crate::registry::guest_kprobes::read_kprobes;
use crate::registry::state::Registry;
use crate::world::World;

/// A batch in the process of registration. `S` is what is known about each probe that was not refused yet.
struct Batch<'s, S> {
    refusals: Refusals,
    probes: Vec<Entry<'s, S>>,
    skipped: Vec<Skipped>,
}

/// One probe of a batch. Its definition names one place.
struct Entry<'s, S> {
    /// Position of the probe's definition in the batch.
    index: usize,
    spec: Cow<'s, ProbeSpec>,
    state: S,
}

/// A probe that has passed the checks, so that it can be planted.
struct Planned {
    /// `None` for a probe that waits for its module.
    point: Option<Probepoint>,
    resolved: Resolved,
}

/// A probe that was added to the registry.
struct Placed {
    id: ProbeId,
    /// Address of its site; `None` while it is pending.
    at: Option<Gva>,
}

impl<'s, S> Batch<'s, S> {
    /// Runs one step for every probe. Returns the batch without the refused probes, and the refused probes.
    fn each<T>(
        self,
        mut step: impl FnMut(&ProbeSpec, S) -> Result<T, Refused>,
    ) -> (Batch<'s, T>, Vec<Skipped>) {
        let mut probes = Vec::with_capacity(self.probes.len());
        let mut refused = Vec::new();
        for Entry { index, spec, state } in self.probes {
            match step(&spec, state) {
                Ok(state) => probes.push(Entry { index, spec, state }),
                Err(why) => refused.push(Skipped::new(index, &spec, why)),
            }
        }
        let batch = Batch {
            refusals: self.refusals,
            probes,
            skipped: self.skipped,
        };
        (batch, refused)
    }
}

impl Batch<'_, Placed> {
    fn ids(&self) -> impl Iterator<Item = ProbeId> {
        self.probes.iter().map(|entry| entry.state.id)
    }

    /// Returns the result of the registration, given the probes that were refused at the end.
    fn registered(self, planted: Planted) -> Registered {
        let Planted {
            refused,
            stopped_for,
        } = planted;
        let mut refused: BTreeMap<ProbeId, Refused> = refused.into_iter().collect();
        let (batch, late) = self.each(|_, Placed { id, .. }| match refused.remove(&id) {
            None => Ok(id),
            Some(why) => Err(why),
        });
        let mut skipped = batch.skipped;
        skipped.extend(late);
        skipped.sort_by_key(|skipped| skipped.index);
        let probes = batch.probes.into_iter();
        Registered {
            probes: probes.map(|entry| (entry.index, entry.state)).collect(),
            skipped,
            stopped_for,
        }
    }

    /// Returns the error for a batch of which no probe was planted.
    fn error(&self, error: PlantError) -> RegisterError {
        let (to_blame, source) = match error {
            PlantError::Stop(error) => return error.into(),
            PlantError::Replaced => (self.probes.first(), Refused::Replaced),
            PlantError::Refused(id, why) => {
                let mut entries = self.probes.iter();
                (entries.find(|entry| entry.state.id == id), why)
            }
            PlantError::Site(Obstacle { at, why }) => {
                let is_here =
                    |entry: &&Entry<'_, Placed>| !entry.spec.disabled && entry.state.at == Some(at);
                // The first probe is blamed for an obstacle to a hook of the engine.
                let any = self.probes.iter().find(is_here).or(self.probes.first());
                (any.filter(|_| self.refusals == Refusals::Fail), why)
            }
        };
        match to_blame {
            Some(entry) => Skipped::new(entry.index, &entry.spec, source).into(),
            None => RegisterError::Unplanted { source },
        }
    }
}

impl Registry {
    /// Registers `specs`, all or none, in one stop of the virtual CPUs. While the guest boots, the probes are
    /// checked against the kernel image and stay pending. Probes of modules that are not loaded also stay pending.
    /// A pattern is expanded to the functions that match now.
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

    /// As [`Registry::register`]; `refusals` says what happens to the other probes when one is refused. A
    /// refused probe costs no stop of its own, but a second stop may follow, in which other sites get the jumps
    /// that it had prevented.
    ///
    /// # Errors
    /// With [`Refusals::Fail`] as [`Registry::register`]; with [`Refusals::Skip`] when the specification of a
    /// probe is invalid, or the virtual CPUs cannot be stopped. Nothing has changed then.
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
        if self.is_overwritten(world.memory()) {
            self.find_out_replaced(world);
        }
        if specs
            .iter()
            .any(|spec| self.kernel.may_be_of_a_module(spec))
        {
            self.read_modules(world.memory());
        }
        read_kprobes(&mut self.kprobes, self.live.as_ref(), world.memory());
        let batch = self.expand(specs, refusals)?;
        let batch = self.plan_all(batch, specs, world.memory())?;
        let batch = self.place_all(batch)?;
        if batch.probes.is_empty() {
            return Ok(batch.registered(Planted::default()));
        }
        match self.plant(&batch.ids().collect(), refusals, world) {
            Ok(planted) => {
                self.remove_unplanted(planted.refused.iter().map(|(id, _)| *id));
                Ok(batch.registered(planted))
            }
            Err(PlantError::Replaced) => {
                self.remove_unplanted(batch.ids());
                // The registry knows that the guest runs another kernel, so this call refuses the whole batch.
                self.register_batch(specs, refusals, world)
            }
            Err(error) => {
                self.remove_unplanted(batch.ids());
                Err(batch.error(error))
            }
        }
    }

    /// Removes probes that were not planted.
    fn remove_unplanted(&mut self, ids: impl IntoIterator<Item = ProbeId>) {
        for id in ids {
            detach(id, &mut self.probes, &mut self.sites);
            self.probes.remove(id);
        }
    }

    /// Checks that the machine has room for `more` probes.
    ///
    /// # Errors
    /// When there is not enough room.
    fn has_room(&self, more: usize) -> Result<(), Refused> {
        let (there, max) = (self.probes.len(), self.room);
        if there + more > max {
            return Err(Refused::TooManyProbes { there, max });
        }
        Ok(())
    }

    /// Expands the patterns of `specs`.
    fn expand<'s>(
        &self,
        specs: &'s [ProbeSpec],
        refusals: Refusals,
    ) -> Result<Batch<'s, ()>, RegisterError> {
        let mut batch = Batch {
            refusals,
            probes: Vec::with_capacity(specs.len()),
            skipped: Vec::new(),
        };
        for (index, spec) in specs.iter().enumerate() {
            let room = BATCH_MAX.saturating_sub(batch.probes.len() + batch.skipped.len());
            let singles = match self.replaced {
                true => Err(Refused::Replaced),
                false => singles(&self.kernel.probeable(), spec, room),
            };
            let singles = singles.and_then(|singles| {
                self.has_room(batch.probes.len() + singles.len())?;
                Ok(singles)
            });
            match singles {
                Ok(singles) => batch.probes.extend(singles.into_iter().map(|spec| Entry {
                    index,
                    spec,
                    state: (),
                })),
                Err(why) => {
                    let refused = Skipped::new(index, spec, why);
                    if refusals == Refusals::Fail {
                        return Err(refused.into());
                    }
                    batch.skipped.push(refused);
                }
            }
        }
        Ok(batch)
    }

    /// Finds and checks the probepoints, and resolves the arguments.
    fn plan_all<'s>(
        &self,
        batch: Batch<'s, ()>,
        specs: &[ProbeSpec],
        mem: &dyn PhysMemory,
    ) -> Result<Batch<'s, Planned>, RegisterError> {
        let rules = self.rules();
        let (mut batch, mut refused) = batch.each(|spec, ()| {
            self.kernel.probeable().check_stacks(spec)?;
            let point = match find_probepoint(spec, &self.kernel, &rules, mem) {
                Ok(point) => Some(point),
                Err(Refused::ModuleNotLoaded { .. }) => None,
                Err(why) => return Err(why),
            };
            let resolved = resolve(spec, point.as_ref(), &self.kernel.probeable())?;
            Ok(Planned { point, resolved })
        });
        if batch.refusals == Refusals::Skip || refused.is_empty() {
            batch.skipped.append(&mut refused);
            return Ok(batch);
        }
        let first = refused.swap_remove(0);
        let index = first.index;
        let spec = specs.get(index).map(|spec| &spec.definition);
        let pattern = spec.filter(|of| matches!(of.target, Target::Functions { .. }));
        Err(match pattern {
            None => first.into(),
            Some(definition) => {
                let others = refused.iter().filter(|other| other.index == index);
                let good = batch.probes.iter().filter(|entry| entry.index == index);
                let count = 1 + others.count();
                RegisterError::SomeRefused {
                    index,
                    definition: definition.to_string(),
                    count,
                    functions: count + good.count(),
                    first: Box::new(first),
                }
            }
        })
    }

    /// Adds the probes to the registry and, once the kernel is live, to their sites.
    fn place_all<'s>(
        &mut self,
        batch: Batch<'s, Planned>,
    ) -> Result<Batch<'s, Placed>, RegisterError> {
        let (mut batch, mut refused) = batch.each(|spec, Planned { point, resolved }| {
            let at = point.as_ref().map(|point| point.displaced.at());
            let calls = &self.shared.returns.calls;
            let probe = create(self.probes.next_id(), spec, resolved, calls, self.vcpus)?;
            let id = self.probes.add(probe);
            if self.live.is_some()
                && let Some(point) = point
            {
                place(id, point, &mut self.probes, &mut self.sites);
            }
            Ok(Placed { id, at })
        });
        if batch.refusals == Refusals::Fail && !refused.is_empty() {
            self.remove_unplanted(batch.ids());
            return Err(refused.swap_remove(0).into());
        }
        batch.skipped.append(&mut refused);
        Ok(batch)
    }
}
