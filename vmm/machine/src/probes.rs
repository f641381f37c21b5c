//! Registering and changing a machine's probes.
//!
//! Invariant: every function that unregisters or disables a probe also reports the hits that were throttled until
//! then.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use hvprobe_engine::{
    ChangeError, ProbeInfo, Refusals, RegisterError, Registered, StopError, Usage,
};
use hvprobe_spec::{ProbeId, ProbeSpec};
use tracing::{info, warn};

use crate::claims::{LetGo, Owner};
use crate::config::Ending;
use crate::guest::Guest;
use crate::machine::Machine;

impl Machine {
    /// Registers a batch of probes, all or none, in one stop of the vCPUs.
    ///
    /// # Errors
    /// The first probe that was refused, and why.
    pub fn register(&self, specs: &[ProbeSpec]) -> Result<Vec<ProbeId>, RegisterError> {
        Ok(self.register_batch(specs, Refusals::Fail)?.ids())
    }

    /// Registers a batch of probes in one stop of the vCPUs. `refusals` says whether a refused probe fails the
    /// batch or is left out.
    ///
    /// # Errors
    /// As [`Machine::register`]. If refused probes are left out, only errors of the whole batch.
    pub fn register_batch(
        &self,
        specs: &[ProbeSpec],
        refusals: Refusals,
    ) -> Result<Registered, RegisterError> {
        self.register_for(None, specs, refusals)
    }

    /// Like [`Machine::register_batch`], but makes `owner` the owner of the probes.
    ///
    /// # Errors
    /// As [`Machine::register_batch`].
    pub fn register_for(
        &self,
        owner: Option<Owner>,
        specs: &[ProbeSpec],
        refusals: Refusals,
    ) -> Result<Registered, RegisterError> {
        let mut registry = self.registry();
        let registered = registry.register_batch(specs, refusals, &Guest(&self.shared))?;
        if let Some(owner) = owner {
            self.shared.claims().take(registered.ids(), owner);
        }
        drop(registry);
        info!(
            machine = self.config.name,
            probes = registered.probes.len(),
            skipped = registered.skipped.len(),
            stopped_for = ?registered.stopped_for,
            "probes registered"
        );
        Ok(registered)
    }

    /// Unregisters probes, all or none.
    ///
    /// # Errors
    /// When one of them does not exist or the vCPUs do not stop.
    pub fn unregister(&self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        let mut registry = self.registry();
        let unregistered = registry.unregister(ids, &Guest(&self.shared));
        if unregistered.is_ok() {
            self.shared.claims().forget(ids);
        }
        drop(registry);
        self.report_throttled();
        unregistered
    }

    /// Unregisters all probes of `owners`, in one stop of the vCPUs, and ends their pauses. Then resumes the
    /// machine if nothing else pauses it.
    ///
    /// # Errors
    /// When the vCPUs cannot be stopped. Then nothing has changed.
    pub fn let_go(&self, owners: &[Owner]) -> Result<LetGo, ChangeError> {
        let mut registry = self.registry();
        // Claims on probes change only under the registry's lock.
        let theirs = self.shared.claims().of(owners);
        let ids: Vec<ProbeId> = theirs.iter().map(|(id, _)| *id).collect();
        if !ids.is_empty() {
            registry.unregister(&ids, &Guest(&self.shared))?;
        }
        let mut claims = self.shared.claims();
        let resumed = claims.release(owners);
        if resumed {
            self.shared.control.resume();
        }
        drop(claims);
        drop(registry);
        if !ids.is_empty() {
            self.report_throttled();
        }
        self.notify_change();
        let mut probes = BTreeMap::new();
        for (_, owner) in theirs {
            *probes.entry(owner).or_default() += 1;
        }
        Ok(LetGo { probes, resumed })
    }

    /// Returns the probes that have an owner, with their owners.
    #[must_use]
    pub fn owners(&self) -> BTreeMap<ProbeId, Owner> {
        self.shared.claims().probes().clone()
    }

    /// Enables probes, all or none.
    ///
    /// # Errors
    /// As [`Machine::unregister`], or when one cannot be armed.
    pub fn enable(&self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        self.registry().set_enabled(ids, true, &Guest(&self.shared))
    }

    /// Disables probes, all or none. They stay registered.
    ///
    /// # Errors
    /// As [`Machine::unregister`].
    pub fn disable(&self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        let disabled = self
            .registry()
            .set_enabled(ids, false, &Guest(&self.shared));
        self.report_throttled();
        disabled
    }

    /// Sets the global switch. If `armed` is false, removes all patches from the guest; if true, arms all enabled
    /// probes again. Probes that are enabled or disabled stay so.
    ///
    /// # Errors
    /// As [`Machine::enable`].
    pub fn set_armed(&self, armed: bool) -> Result<(), ChangeError> {
        let mut registry = self.registry();
        let switched = registry.set_armed(armed, &Guest(&self.shared));
        self.armed.store(registry.is_armed(), Ordering::Relaxed);
        switched
    }

    /// Returns whether the global switch is on. Does not wait for a change in progress.
    #[must_use]
    pub fn armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    /// Turns optimization on or off for all probes. If `on` is true, probes are jumps where possible; if false, all
    /// are int3s.
    ///
    /// # Errors
    /// As [`Machine::enable`].
    pub fn set_optimization(&self, on: bool) -> Result<(), ChangeError> {
        self.registry().set_optimization(on, &Guest(&self.shared))
    }

    /// Returns all registered probes, with their counts up to now.
    #[must_use]
    pub fn probes(&self) -> Vec<ProbeInfo> {
        self.shared.detours.catch_up();
        self.registry().list(&*self.shared.ram)
    }

    /// Returns how much of the engine's resources probes and ghosts use.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.registry().usage()
    }

    /// Unregisters all probes, ends the guest, and waits until the machine has ended. Returns how it ended.
    pub fn stop(&self) -> Ending {
        match self.registry().unregister_all(&Guest(&self.shared)) {
            Ok(()) | Err(ChangeError::Stop(StopError::Ended)) => {}
            Err(error) => warn!(%error, "the guest is ended with its probes in place"),
        }
        self.report_throttled();
        self.shared.control.end();
        self.wait()
    }
}
