//! The probes of a machine, as its users register and change them.
//!
//! Invariant: whatever takes a probe out of the guest, or turns it off, tells what was throttled of it
//! until then.

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
    /// Registers a batch of probes, all or none, in one stop of the virtual CPUs.
    ///
    /// # Errors
    /// Names the first probe that was refused, and why.
    pub fn register(&self, specs: &[ProbeSpec]) -> Result<Vec<ProbeId>, RegisterError> {
        Ok(self.register_batch(specs, Refusals::Fail)?.ids())
    }

    /// Registers a batch of probes in one stop of the virtual CPUs; `refusals` says what becomes of
    /// the rest when one is refused.
    ///
    /// # Errors
    /// As [`Machine::register`]; when refusals are skipped, only for what makes no sense anywhere.
    pub fn register_batch(
        &self,
        specs: &[ProbeSpec],
        refusals: Refusals,
    ) -> Result<Registered, RegisterError> {
        self.register_for(None, specs, refusals)
    }

    /// As [`Machine::register_batch`], but the probes are `owner`'s.
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
    /// When one of them does not exist or the virtual CPUs do not stop.
    pub fn unregister(&self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        let mut registry = self.registry();
        let unregistered = registry.unregister(ids, &Guest(&self.shared));
        if unregistered.is_ok() {
            self.shared.claims().forget(ids);
        }
        drop(registry);
        self.tell_throttled();
        unregistered
    }

    /// Takes out all probes of `owners`, in one stop of the virtual CPUs; then lets the machine go on if
    /// only they, or those probes, had paused it.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped. Then nothing has changed.
    pub fn let_go(&self, owners: &[Owner]) -> Result<LetGo, ChangeError> {
        let mut registry = self.registry();
        // Others come and go only with the registry.
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
            self.tell_throttled();
        }
        self.tell_change();
        let mut probes = BTreeMap::new();
        for (_, owner) in theirs {
            *probes.entry(owner).or_default() += 1;
        }
        Ok(LetGo { probes, resumed })
    }

    /// The probes that belong to somebody, and to whom.
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

    /// Disables probes, all or none; they stay registered.
    ///
    /// # Errors
    /// As [`Machine::unregister`].
    pub fn disable(&self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        let disabled = self
            .registry()
            .set_enabled(ids, false, &Guest(&self.shared));
        self.tell_throttled();
        disabled
    }

    /// The global switch: takes every patch out of the guest, or arms every enabled probe again.
    /// Each probe's own state stays as it is.
    ///
    /// # Errors
    /// As [`Machine::enable`].
    pub fn set_armed(&self, armed: bool) -> Result<(), ChangeError> {
        let mut registry = self.registry();
        let switched = registry.set_armed(armed, &Guest(&self.shared));
        self.armed.store(registry.is_armed(), Ordering::Relaxed);
        switched
    }

    /// Whether the global switch is on. Does not wait for a change that is under way.
    #[must_use]
    pub fn armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    /// The global knob of optimization: jumps where they can be used, or int3s everywhere.
    ///
    /// # Errors
    /// As [`Machine::enable`].
    pub fn set_optimization(&self, on: bool) -> Result<(), ChangeError> {
        self.registry().set_optimization(on, &Guest(&self.shared))
    }

    /// Every registered probe.
    #[must_use]
    pub fn probes(&self) -> Vec<ProbeInfo> {
        self.shared.detours.catch_up();
        self.registry().list(&*self.shared.ram)
    }

    /// What probes, and what is left of former ones, take of what the engine hands out.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.registry().usage()
    }

    /// Takes every probe out of the guest, ends the guest, and returns when it has ended.
    pub fn stop(&self) -> Ending {
        match self.registry().unregister_all(&Guest(&self.shared)) {
            Ok(()) | Err(ChangeError::Stop(StopError::Ended)) => {}
            Err(error) => warn!(%error, "the guest is ended with its probes in place"),
        }
        self.tell_throttled();
        self.shared.control.end();
        self.wait()
    }
}
