//! State that the threads of a machine share.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hvprobe_devices::Devices;
use hvprobe_vm::memory::GuestRam;

use crate::claims::Claims;
use crate::clock::times::Times;
use crate::decide::Decisions;
use crate::detours::Detours;
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::stop::control::Control;
use crate::tripwire::Tripwire;

/// State that all vCPUs of a machine share. An ordinary hit locks nothing of it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) control: Control,
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) devices: Devices,
    pub(crate) tripwire: Option<Tripwire>,
    pub(crate) gate: OnceLock<Gate>,
    pub(crate) metrics: Metrics,
    /// Owners of probes and pauses. vCPUs lock them only at hits that pause the machine.
    pub(crate) claims: Mutex<Claims>,
    pub(crate) decisions: Decisions,
    pub(crate) detours: Detours,
    pub(crate) times: Arc<Times>,
    /// Whether a thread is scanning the guest's memory with the dirty log on.
    pub(crate) noting_writes: AtomicBool,
}

impl Shared {
    /// Locks the owners of probes and pauses.
    pub(crate) fn claims(&self) -> MutexGuard<'_, Claims> {
        // No step leaves the claims half changed, so a panic elsewhere does not corrupt them.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
