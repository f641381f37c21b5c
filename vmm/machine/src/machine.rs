//! A machine: one guest, its vCPUs and its probes.
//!
//! ```text
//!   boot ──► booting ──(text final)──► running ◄──► paused
//!               └──────────┬──────────────┴───────────┘
//!                          ▼ guest ends, fails, or stop
//!                       stopped
//! ```
//! One thread runs per vCPU, one collects events, and a supervisor handles notices from the vCPUs. Lock order:
//! `registry` or `life`, then the claims, then the locks of `Control`; `registry` and `life` are never held
//! together. Invariant: once a machine is stopped, none of its threads runs guest code and all its streams have
//! ended.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hvprobe_arch::Gva;
use hvprobe_arch::paging::WalkError;
use hvprobe_engine::{Refused, Registered, Registry, Standing, StopError};
use hvprobe_hit::aggregate::MemoryBudget;
use hvprobe_hit::event::Flush;
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::modules::Module;
use hvprobe_linux::types::Types;
use hvprobe_spec::ProbeId;
use hvprobe_vm::CatchMode;
use hvprobe_vm::vcpu::Ioctls;

use crate::claims::Owner;
use crate::config::{Ending, MachineConfig, State, Status};
use crate::console::{Console, ConsoleOutput};
use crate::decide::Decisions;
use crate::events::subscription::{Hub, Listen, Subscription};
use crate::vcpu::shared::Shared;

/// Error of pausing a running machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the machine cannot be paused")]
pub struct PauseError(#[from] StopError);

/// Error of sending an NMI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NmiError {
    /// The vCPU does not exist. The vCPUs are numbered from 0.
    #[error("there is no virtual CPU {vcpu}, the machine has {vcpus}")]
    NoSuchVcpu {
        /// The number asked for.
        vcpu: u32,
        /// The number of vCPUs.
        vcpus: u32,
    },
    /// The machine has ended.
    #[error("no NMI can be sent")]
    Stop(#[from] StopError),
}

/// Error of reading guest memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The page tables of the running kernel are not known: its text is not final yet, or the guest has replaced
    /// the kernel it was booted with.
    #[error("the guest is still booting, or runs another kernel")]
    Booting,
    /// The address is not mapped.
    #[error("guest memory cannot be read")]
    Walk(#[from] WalkError),
}

#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) live: bool,
    /// Whether the guest has replaced the kernel it was booted with.
    pub(crate) kernel_replaced: bool,
    pub(crate) ending: Option<Ending>,
}

/// One guest with its probes. All methods may be called from any thread. They may block.
#[derive(Debug)]
pub struct Machine {
    pub(crate) config: MachineConfig,
    pub(crate) mode: CatchMode,
    pub(crate) image: Arc<KernelImage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) registry: Mutex<Registry>,
    /// Whether the global switch of `registry` is on.
    pub(crate) armed: AtomicBool,
    /// Result of registering the probes of the configuration, before the boot.
    pub(crate) registered: Registered,
    pub(crate) console: Arc<ConsoleOutput>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) flush: Flush,
    /// Counts the histograms: each holds a clone. The reference count is one more than their number.
    pub(crate) aggregations: Arc<()>,
    /// Budget of the memory of all histograms together.
    pub(crate) histograms: Arc<MemoryBudget>,
    /// Time of the last check for throttled hits. Locked after `registry`.
    pub(crate) throttle_looked: Mutex<Instant>,
    pub(crate) life: Mutex<Life>,
    pub(crate) changed: Condvar,
}

impl Machine {
    /// Returns the configuration that the machine was booted from.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// Returns the kernel image, with its symbols and forbidden places.
    #[must_use]
    pub fn image(&self) -> &Arc<KernelImage> {
        &self.image
    }

    /// Returns the current status.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status_in(&self.life())
    }

    fn status_in(&self, life: &Life) -> Status {
        let state = match &life.ending {
            Some(ending) => State::Stopped(ending.clone()),
            None if self.shared.control.is_paused() => State::Paused,
            None if life.live => State::Running,
            None => State::Booting,
        };
        Status {
            state,
            catch_mode: self.mode,
            stopped_at: self.shared.claims().stopped_at(),
            kernel_replaced: life.kernel_replaced,
        }
    }

    /// Waits until the status differs from `last`, and returns it.
    #[must_use]
    pub fn wait_change(&self, last: &Status) -> Status {
        self.wait_for(|life| Some(self.status_in(life)).filter(|status| status != last))
    }

    /// Waits until `found` returns a value, and returns that value. Calls `found` again after every change of the
    /// status.
    fn wait_for<T>(&self, found: impl Fn(&Life) -> Option<T>) -> T {
        let mut life = self.life();
        loop {
            if let Some(found) = found(&life) {
                return found;
            }
            life = self
                .changed
                .wait(life)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes the threads that wait for a change of the status. To be called after a change that `life` does not
    /// guard.
    pub(crate) fn notify_change(&self) {
        // A thread that has read the status from before the change holds `life` until it waits. It waits once
        // `life` can be locked here, so the notification reaches it.
        drop(self.life());
        self.changed.notify_all();
    }

    /// Waits until the kernel's text is final and the pending probes are planted, or until the machine has ended.
    /// Returns the status.
    #[must_use]
    pub fn wait_live(&self) -> Status {
        self.wait_for(|life| (life.live || life.ending.is_some()).then(|| self.status_in(life)))
    }

    /// Waits until the machine has ended.
    #[must_use]
    pub fn wait(&self) -> Ending {
        self.wait_for(|life| life.ending.clone())
    }

    /// Stops all vCPUs until [`Machine::resume`], and waits until they have stopped. Pausing a paused machine
    /// changes nothing.
    ///
    /// # Errors
    /// When the machine has ended or a vCPU does not stop.
    pub fn pause(&self) -> Result<(), PauseError> {
        self.pause_for(None)
    }

    /// Like [`Machine::pause`], but the pause ends when `owner` is released. A machine that several
    /// owners have paused continues when all of them are released.
    ///
    /// # Errors
    /// As [`Machine::pause`].
    pub fn pause_for(&self, owner: Option<Owner>) -> Result<(), PauseError> {
        let control = &self.shared.control;
        let mut claims = self.shared.claims();
        let is_new = claims.pause(owner);
        control.pause_now();
        drop(claims);
        if let Err(error) = control.wait_paused() {
            let mut claims = self.shared.claims();
            if is_new && claims.unpause(owner) {
                control.resume();
            }
            return Err(error.into());
        }
        self.notify_change();
        Ok(())
    }

    /// Returns the owners of the machine's pauses.
    #[must_use]
    pub fn paused_by(&self) -> Vec<Owner> {
        self.shared.claims().paused_by()
    }

    /// Returns whether `owner` has a probe or a pause of this machine. Does not block.
    #[must_use]
    pub fn belongs_to(&self, owner: Owner) -> bool {
        self.shared.claims().has(owner)
    }

    /// Lets the vCPUs continue. Resuming a running machine changes nothing.
    ///
    /// # Errors
    /// When the machine has ended.
    pub fn resume(&self) -> Result<(), PauseError> {
        if self.life().ending.is_some() {
            return Err(StopError::Ended.into());
        }
        let mut claims = self.shared.claims();
        claims.resume();
        self.shared.control.resume();
        drop(claims);
        self.notify_change();
        Ok(())
    }

    /// Sends an NMI to one vCPU or to all. Does not wait until the guest takes it. The vCPUs of a paused machine
    /// take the NMI when they continue. The rest is as on hardware: an NMI that arrives before the guest has taken
    /// the last one is merged with that one; a vCPU that the guest has not started takes none; and a guest whose
    /// kernel is not ready for an NMI dies of it.
    ///
    /// # Errors
    /// When the machine has ended or has no such vCPU.
    pub fn inject_nmi(&self, vcpu: Option<u32>) -> Result<(), NmiError> {
        let vcpus = self.config.cpus;
        let range = match vcpu {
            None => 0..vcpus,
            Some(vcpu) if vcpu < vcpus => vcpu..vcpu + 1,
            Some(vcpu) => return Err(NmiError::NoSuchVcpu { vcpu, vcpus }),
        };
        let indices = range.filter_map(|index| usize::try_from(index).ok());
        Ok(self.shared.control.send_nmi(indices)?)
    }

    /// Returns all console output that is kept; it is the newest output.
    #[must_use]
    pub fn console_kept(&self) -> Vec<u8> {
        self.console.kept()
    }

    /// Returns a listener that gets the console output that is kept, and all later output.
    #[must_use]
    pub fn console(&self) -> Console {
        self.console.follow()
    }

    /// Types `bytes` on the console. Returns how many of them fitted into the input queue.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        self.shared.devices.console_input(bytes)
    }

    /// Returns the result of registering the probes of the configuration, before the boot.
    #[must_use]
    pub fn registered(&self) -> &Registered {
        &self.registered
    }

    /// Returns the questions that hits put to clients.
    #[must_use]
    pub fn decisions(&self) -> &Decisions {
        &self.shared.decisions
    }

    /// Adds `listener`, which gets all later events. Does nothing if the machine has ended.
    pub fn listen(&self, listener: Box<dyn Listen>) {
        self.hub.listen(listener);
    }

    /// Returns a stream of later events: those of the probes in `filter`, or of all probes if it is empty. At most
    /// `capacity` events wait in the stream; further ones are dropped and counted.
    #[must_use]
    pub fn subscribe(&self, filter: Vec<ProbeId>, capacity: usize) -> Subscription {
        self.hub.subscribe(filter, capacity)
    }

    /// Reads kernel memory as it is in the guest now, our patches included.
    ///
    /// # Errors
    /// While the guest is booting, or when the memory is not mapped.
    pub fn read_kernel(&self, at: Gva, into: &mut [u8]) -> Result<(), ReadError> {
        let view = self.shared.control.view().ok_or(ReadError::Booting)?;
        Ok(view.tables.read(&*self.shared.ram, at, into)?)
    }

    /// Returns the types of loaded modules, by module name. `wanted` has the names, each with its position in the
    /// request.
    ///
    /// # Errors
    /// The position of the first module that is not loaded or whose types are unknown, and the reason.
    pub fn module_types(
        &self,
        wanted: &[(usize, String)],
    ) -> Result<BTreeMap<String, Arc<Types>>, (usize, Refused)> {
        self.registry().module_types(wanted, &*self.shared.ram)
    }

    /// Returns the loaded module in whose memory `at` lies; `None` if there is none or the modules cannot be read.
    #[must_use]
    pub fn module_at(&self, at: Gva) -> Option<Module> {
        self.registry().module_at(at, &*self.shared.ram)
    }

    /// Returns the build id of the loaded `module`, if the guest's kernel keeps it.
    #[must_use]
    pub fn build_id(&self, module: &Module) -> Option<Vec<u8>> {
        self.registry().build_id(module, &*self.shared.ram)
    }

    /// Returns the number of ioctls of each vCPU. The numbers are up to date while the machine is paused or
    /// stopped.
    #[must_use]
    pub fn ioctls(&self) -> Vec<Ioctls> {
        self.shared.metrics.ioctls()
    }

    /// Returns the host time, in nanoseconds of `CLOCK_MONOTONIC`, at which the guest executed its first
    /// instruction; `None` before that.
    #[must_use]
    pub fn first_entry_ns(&self) -> Option<u64> {
        self.shared.metrics.first_entry()
    }

    /// Stops the vCPUs, reads their standings and lets them continue. Returns the standings. A vCPU that has not
    /// run yet has none.
    ///
    /// # Errors
    /// When the machine has ended or a vCPU does not stop.
    pub fn standings(&self) -> Result<Vec<Standing>, StopError> {
        let mut all = Vec::new();
        self.shared.control.transact(|standings| {
            all.extend_from_slice(standings);
            None
        })?;
        Ok(all)
    }

    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        // A registry whose transaction has panicked can be used further: its fields are updated only after the
        // text.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn throttle_looked(&self) -> MutexGuard<'_, Instant> {
        self.throttle_looked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
