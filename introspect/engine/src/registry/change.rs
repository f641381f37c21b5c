//! Changes of registered probes: the kernel's text becomes final, probes leave, are enabled and disabled, and
//! the two global switches change.
//!
//! Invariant: a change happens whole or not at all, in one stop of the virtual CPUs.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_arch::insn::GateHead;
use hvprobe_hit::KernelView;
use hvprobe_spec::ProbeId;
use tracing::{info, warn};

use super::commit::CommitError;
use super::guest_kprobes::{leave_covered, read_kprobes};
use super::live::Live;
use super::live_plan::find_probepoint;
use super::module_loading::has_module_probes;
use super::optimize::stack_fields;
use super::place::{detach, place, resolve_awaited};
use super::plant::PlantError;
use super::state::Registry;
use super::throttle::{refill, remove_probe};
use crate::code::scan::is_feasible;
use crate::error::ChangeError;
use crate::guest::banner::Banner;
use crate::guest::readers::KernelReaders;
use crate::plan::probepoint::Probepoint;
use crate::refusal::{Obstacle, Refused};
use crate::registered::Refusals;
use crate::sites::site::Placement;
use crate::world::{StopError, World};

impl Registry {
    /// Plants the pending probes in one stop of the virtual CPUs, now that the kernel's text is final. If some of
    /// them cannot be planted, marks these as refused and returns them.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped; then every probe is still pending.
    pub fn go_live(
        &mut self,
        view: KernelView,
        gate: Option<GateHead>,
        world: &dyn World,
    ) -> Result<Vec<(ProbeId, Refused)>, StopError> {
        let (image, mem) = (&self.kernel.image, world.memory());
        let readers = KernelReaders::find(image, &view, mem);
        if let Err(why) = &readers {
            info!(%why, "probes that read memory take an exit");
        }
        self.live = Some(Live {
            view,
            gate,
            gate_planted: false,
            banner: Banner::read(image, &view.tables, mem),
            readers,
            stack: stack_fields(image, view.task.ok()),
        });
        self.can_scan = is_feasible(world.memory());
        self.read_modules(world.memory());
        read_kprobes(&mut self.kprobes, self.live.as_ref(), world.memory());
        let refused = self.settle_pending(world);
        if refused.is_err() {
            for id in self.probes.ids() {
                detach(id, &mut self.probes, &mut self.sites);
            }
            // The remaining sites are the engine's hooks.
            self.sites.clear();
            self.live = None;
        }
        refused
    }

    /// Plants the pending probes whose probepoints exist now. Marks the probes that cannot be planted as
    /// refused and returns them.
    pub(crate) fn settle_pending(
        &mut self,
        world: &dyn World,
    ) -> Result<Vec<(ProbeId, Refused)>, StopError> {
        let pending: Vec<ProbeId> = self
            .probes
            .iter()
            .filter(|(_, probe)| matches!(probe.placement, Placement::Pending))
            .map(|(id, _)| id)
            .collect();
        let (mut refused, mut placed) = (Vec::new(), BTreeSet::new());
        for id in pending {
            let Some(probe) = self.probes.get(id) else {
                continue;
            };
            let mem = world.memory();
            match find_probepoint(&probe.spec, &self.kernel, &self.rules(), mem) {
                Ok(point) => match self.resolve_awaited(id, &point) {
                    Ok(()) => {
                        place(id, point, &mut self.probes, &mut self.sites);
                        placed.insert(id);
                    }
                    Err(why) => refused.push((id, why)),
                },
                Err(Refused::ModuleNotLoaded { .. }) => {}
                Err(why) => refused.push((id, why)),
            }
        }
        match self.plant(&placed, Refusals::Skip, world) {
            Ok(planted) => refused.extend(planted.refused),
            Err(PlantError::Stop(error)) => return Err(error),
            Err(PlantError::Replaced) => {}
            // The probes stay pending.
            Err(PlantError::Site(Obstacle { why, .. }) | PlantError::Refused(_, why)) => {
                warn!(%why, "pending probes cannot be planted");
            }
        }
        for (id, why) in &refused {
            if let Some(probe) = self.probes.get_mut(*id) {
                probe.placement = Placement::Refused(why.clone());
            }
        }
        Ok(refused)
    }

    /// Resolves the captured items and shown values of probe `id`, if they had to wait for its module.
    fn resolve_awaited(&mut self, id: ProbeId, point: &Probepoint) -> Result<(), Refused> {
        let (kernel, calls) = (self.kernel.probeable(), &self.shared.returns.calls);
        resolve_awaited(id, point, &mut self.probes, &kernel, calls, self.vcpus)
    }

    /// Unregisters `ids`, all or none. When the call returns, the original bytes are restored, no virtual CPU
    /// is in a handler of these probes, and calls in flight of return probes return directly to their callers.
    ///
    /// # Errors
    /// When one of them does not exist or the virtual CPUs cannot be stopped.
    pub fn unregister(&mut self, ids: &[ProbeId], world: &dyn World) -> Result<(), ChangeError> {
        let mut leaving = BTreeSet::new();
        for (index, &id) in ids.iter().enumerate() {
            if !self.probes.contains(id) || !leaving.insert(id) {
                return Err(ChangeError::NoSuchProbe { id, index });
            }
        }
        self.probes.leave(leaving.iter().copied());
        self.provide_hooks(world.memory());
        self.commit(world).map_err(|error| {
            self.probes.stay();
            self.provide_hooks(world.memory());
            self.change_error(error, ids)
        })?;
        // Records written before the jumps were removed are passed on first.
        world.collect();
        self.code.retire_sources(leaving.iter().copied());
        for id in leaving {
            remove_probe(id, &mut self.probes, &mut self.last_throttled);
        }
        Ok(())
    }

    /// Unregisters all probes.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn unregister_all(&mut self, world: &dyn World) -> Result<(), ChangeError> {
        self.unregister(&self.probes.ids(), world)
    }

    /// Enables or disables `ids`, all or none. When the call returns, a disabled probe makes no more events; a
    /// hit in progress at that time is still counted.
    ///
    /// # Errors
    /// When one of them does not exist, cannot be armed, or the virtual CPUs cannot be stopped.
    pub fn set_enabled(
        &mut self,
        ids: &[ProbeId],
        enabled: bool,
        world: &dyn World,
    ) -> Result<(), ChangeError> {
        if enabled && self.is_overwritten(world.memory()) {
            self.find_out_replaced(world);
        }
        for (index, &id) in ids.iter().enumerate() {
            let Some(probe) = self.probes.get(id) else {
                return Err(ChangeError::NoSuchProbe { id, index });
            };
            if enabled && self.replaced {
                let source = Refused::Replaced;
                return Err(ChangeError::Refused { id, source });
            }
            if enabled
                && let Placement::At(at) = probe.placement
                && let Some(site) = self.sites.get(&at)
                && self.is_rewritten(site, world.memory())
            {
                let source = Refused::Rewritten { at };
                return Err(ChangeError::Refused { id, source });
            }
        }
        if enabled {
            refill(ids, &self.probes);
        }
        let mut before = BTreeMap::new();
        for id in ids {
            if let Some(probe) = self.probes.get_mut(*id) {
                before.entry(*id).or_insert(probe.spec.disabled);
                probe.spec.disabled = !enabled;
            }
        }
        self.provide_hooks(world.memory());
        self.commit(world).map_err(|error| {
            for (id, disabled) in before {
                if let Some(probe) = self.probes.get_mut(id) {
                    probe.spec.disabled = disabled;
                }
            }
            self.provide_hooks(world.memory());
            self.change_error(error, ids)
        })?;
        self.silence_disabled(world);
        Ok(())
    }

    /// Ensures that the probes that have just been disabled make no more events: a task preempted in a detour
    /// may be about to finish a record.
    fn silence_disabled(&self, world: &dyn World) {
        let sources = self.code.sources.iter();
        let due: Vec<_> = sources.filter(|it| it.is_to_be_silenced()).collect();
        if !due.is_empty() {
            // Records written so far are passed on first.
            world.collect();
            due.iter().for_each(|source| source.silence());
        }
    }

    /// Sets the global switch: arms every enabled probe, or removes every patch from the guest. Each probe stays
    /// enabled or disabled.
    ///
    /// # Errors
    /// When a probe cannot be armed or the virtual CPUs cannot be stopped; nothing has changed then.
    pub fn set_armed(&mut self, on: bool, world: &dyn World) -> Result<(), ChangeError> {
        if on && has_module_probes(&self.probes, &self.kernel.image) {
            // While the switch was off, the engine did not watch modules come and go.
            self.modules_changed(None, world)?;
        }
        // A site that the guest has rewritten meanwhile, or may rewrite, is left alone, so that it does not prevent
        // arming the others.
        self.check_text(world);
        if on {
            read_kprobes(&mut self.kprobes, self.live.as_ref(), world.memory());
            leave_covered(&mut self.sites, &self.probes, &self.kprobes.registered);
        }
        let before = std::mem::replace(&mut self.switches.armed, on);
        self.commit(world).map_err(|error| {
            self.switches.armed = before;
            self.change_error(error, &self.probes.ids())
        })?;
        self.silence_disabled(world);
        Ok(())
    }

    /// Sets the global switch of optimization: uses jumps where possible, or int3s everywhere.
    ///
    /// # Errors
    /// When a probe cannot be armed or the virtual CPUs cannot be stopped; nothing has changed then.
    pub fn set_optimization(&mut self, on: bool, world: &dyn World) -> Result<(), ChangeError> {
        let before = std::mem::replace(&mut self.switches.optimize, on);
        self.provide_hooks(world.memory());
        self.commit(world).map_err(|error| {
            self.switches.optimize = before;
            self.provide_hooks(world.memory());
            self.change_error(error, &self.probes.ids())
        })
    }

    /// Converts `error`. If a site cannot be armed, the result names the one of `ids` that is at this site, or the
    /// site if there is none.
    fn change_error(&self, error: CommitError, ids: &[ProbeId]) -> ChangeError {
        match error {
            CommitError::Stop(error) => error.into(),
            CommitError::Sites(obstacles) => {
                let Obstacle { at, why } = obstacles.first();
                // A set, because both lists of ids may be long.
                let ids: BTreeSet<ProbeId> = ids.iter().copied().collect();
                let site = self.sites.get(&at);
                let id = site.and_then(|site| site.members.iter().find(|id| ids.contains(id)));
                match id.copied() {
                    Some(id) => ChangeError::Refused { id, source: why },
                    None => ChangeError::Site { at, source: why },
                }
            }
        }
    }
}
