//! A machine: one guest, its virtual CPUs and its probes.
//!
//! ```text
//!   boot ──► booting ──(text final)──► running ◄──► paused
//!               └──────────┬──────────────┴───────────┘
//!                          ▼ guest ends, fails, or stop
//!                       stopped
//! ```
//! One thread per virtual CPU, one that collects events, and a supervisor that takes notices from
//! the virtual CPUs. Lock order: `registry`, then what `Control` holds; `life` is taken alone.
//! Invariant: once a machine is stopped, no thread of it runs guest code and every stream of it has
//! ended.

mod attention;
mod barrier;
mod boot;
mod catch;
mod clock;
mod config;
mod console;
mod control;
mod crash;
mod decide;
mod detours;
mod live;
mod queue;
mod subscription;
mod supervisor;
mod throttle;
mod tripwire;
mod vcpu;

use std::sync::atomic::{self, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::WalkError;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_engine::{ChangeError, RegisterError, Registry};
pub use hvprobe_engine::{ProbeInfo, ProbeState, Refusals, Registered, Skipped, Throttled};
use hvprobe_engine::{StopError, WhileStopped, World};
use hvprobe_hit::table::ProbeTable;
use hvprobe_linux::image::KernelImage;
pub use hvprobe_spec::{Budget, Excess, Mechanism, ProbeId, ProbeSpec};
use tracing::{info, warn};

pub use crate::vcpu::fd::Ioctls;
pub use boot::BootError;
pub use config::{DEFAULT_CMDLINE, EndReason, Ending, MachineConfig, State, Status};
pub use console::{Console, Printed};
pub use decide::{AnswerError, Asker, DecisionCounts, Decisions, Question, Token};
pub use hvprobe_hit::event::Event;
pub(crate) use queue::{Entrance, Exit, Taken, queue};
pub(crate) use subscription::Listen;
pub use subscription::{Delivery, Subscription};
pub use throttle::ThrottleNotice;

use crate::catch_mode::CatchMode;
use console::ConsoleOutput;
use subscription::Hub;
use vcpu::{IoctlTotals, Shared};

/// Why a running machine could not be paused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the machine cannot be paused")]
pub struct PauseError(#[from] StopError);

/// Why no NMI was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NmiError {
    /// Virtual CPUs are counted from 0.
    #[error("there is no virtual CPU {vcpu}, the machine has {vcpus}")]
    NoSuchVcpu {
        /// Which one was asked for.
        vcpu: u32,
        /// How many there are.
        vcpus: u32,
    },
    /// Nothing runs any more.
    #[error("no NMI can be sent")]
    Stop(#[from] StopError),
}

/// Why guest memory could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The kernel's page tables are not known before its text is final, nor those of another kernel.
    #[error("the guest is still booting, or runs another kernel")]
    Booting,
    /// Not mapped.
    #[error("guest memory cannot be read")]
    Walk(#[from] WalkError),
}

#[derive(Debug)]
struct Life {
    live: bool,
    /// The guest has left the kernel it was booted with.
    kernel_replaced: bool,
    ending: Option<Ending>,
}

/// One guest with its probes. All methods may be called from any thread; they block.
#[derive(Debug)]
pub struct Machine {
    config: MachineConfig,
    mode: CatchMode,
    image: Arc<KernelImage>,
    shared: Arc<Shared>,
    registry: Mutex<Registry>,
    /// Probes of the configuration that were refused before the boot, and left out.
    skipped: Vec<Skipped>,
    console: Arc<ConsoleOutput>,
    hub: Arc<Hub>,
    ioctls: Vec<Arc<IoctlTotals>>,
    /// When it was last looked for hits that were throttled; after `registry`.
    throttle_looked: Mutex<Instant>,
    life: Mutex<Life>,
    changed: Condvar,
}

/// The machine as the probe engine sees it.
struct Guest<'a>(&'a Shared);

impl World for Guest<'_> {
    fn memory(&self) -> &dyn PhysMemory {
        &*self.0.ram
    }

    fn stopped(&self, change: &mut WhileStopped<'_>) -> Result<Duration, StopError> {
        let ram = &*self.0.ram;
        let control = &self.0.control;
        let stopped_for =
            control.transact(|standings| -> Option<Arc<ProbeTable>> { change(ram, standings) })?;
        // There may be detours where there were none.
        self.0.detours.wake();
        Ok(stopped_for)
    }

    fn note_writes(&self, on: bool) -> bool {
        self.0.ram.note_writes(on).is_ok()
    }

    fn written(&self) -> Option<Vec<Gpa>> {
        self.0.ram.written().ok()
    }

    fn collect(&self) {
        self.0.detours.catch_up();
    }
}

impl Machine {
    /// Boots a machine. It runs when this returns; probes of the configuration are pending until
    /// the kernel's text is final.
    ///
    /// # Errors
    /// When anything about the configuration, its files, its probes or the host does not allow it.
    pub fn boot(config: MachineConfig) -> Result<Arc<Self>, BootError> {
        boot::boot(config)
    }

    /// What it was booted from.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// What the kernel image says: symbols and where probes may go.
    #[must_use]
    pub fn image(&self) -> &Arc<KernelImage> {
        &self.image
    }

    /// What it is doing.
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
            stopped_at: self.shared.stopped_at.get(),
            kernel_replaced: life.kernel_replaced,
        }
    }

    /// Blocks until it is doing something else than `last` says; tells what.
    #[must_use]
    pub fn wait_change(&self, last: &Status) -> Status {
        let mut life = self.life();
        loop {
            let status = self.status_in(&life);
            if status != *last {
                return status;
            }
            life = self
                .changed
                .wait(life)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Its status has changed in what is not guarded by `life`.
    fn tell_change(&self) {
        // Whoever looked at the status before now waits to be told.
        drop(self.life());
        self.changed.notify_all();
    }

    /// Blocks until the kernel's text is final and its pending probes are planted, or the machine
    /// has ended; tells which by its status.
    #[must_use]
    pub fn wait_live(&self) -> Status {
        let mut life = self.life();
        while !life.live && life.ending.is_none() {
            life = self
                .changed
                .wait(life)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(life);
        self.status()
    }

    /// Blocks until the machine has ended.
    #[must_use]
    pub fn wait(&self) -> Ending {
        let mut life = self.life();
        loop {
            if let Some(ending) = &life.ending {
                return ending.clone();
            }
            life = self
                .changed
                .wait(life)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Stops all virtual CPUs until [`Machine::resume`]; they have stopped when this returns.
    /// Pausing a paused machine changes nothing.
    ///
    /// # Errors
    /// When the machine has ended or a virtual CPU does not stop.
    pub fn pause(&self) -> Result<(), PauseError> {
        self.shared.control.pause()?;
        self.tell_change();
        Ok(())
    }

    /// Lets the virtual CPUs go on. Resuming a running machine changes nothing.
    ///
    /// # Errors
    /// When the machine has ended.
    pub fn resume(&self) -> Result<(), PauseError> {
        if self.life().ending.is_some() {
            return Err(StopError::Ended.into());
        }
        self.shared.stopped_at.clear();
        self.shared.control.resume();
        self.tell_change();
        Ok(())
    }

    /// Sends an NMI to one virtual CPU, or to all, and does not wait for the guest to take it. As on
    /// hardware, one that comes before the guest has taken the last is one with it, a virtual CPU that
    /// the guest has not started takes none, and a guest whose kernel is not ready for it dies of it.
    /// A paused machine's virtual CPUs take it when they go on.
    ///
    /// # Errors
    /// When the machine has ended, or has no such virtual CPU.
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

    /// What is kept of the console's output, the newest of it.
    #[must_use]
    pub fn console_kept(&self) -> Vec<u8> {
        self.console.kept()
    }

    /// What is kept of the console's output, and what follows.
    #[must_use]
    pub fn console(&self) -> Console {
        self.console.follow()
    }

    /// Types `bytes` on the console; returns how many there was room for.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        self.shared.ports.console_input(bytes)
    }

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
        let registered = self
            .registry()
            .register_batch(specs, refusals, &Guest(&self.shared))?;
        info!(
            machine = self.config.name,
            probes = registered.probes.len(),
            skipped = registered.skipped.len(),
            stopped_for = ?registered.stopped_for,
            "probes registered"
        );
        Ok(registered)
    }

    /// The probes of the configuration that were refused before the boot, and left out.
    #[must_use]
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// Unregisters probes, all or none.
    ///
    /// # Errors
    /// When one of them does not exist or the virtual CPUs do not stop.
    pub fn unregister(&self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        let unregistered = self.registry().unregister(ids, &Guest(&self.shared));
        self.tell_throttled();
        unregistered
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
        self.registry().switch(armed, &Guest(&self.shared))
    }

    /// Whether the global switch is on.
    #[must_use]
    pub fn armed(&self) -> bool {
        self.registry().is_switched_on()
    }

    /// The questions that hits put to clients.
    #[must_use]
    pub fn decisions(&self) -> &Decisions {
        &self.shared.decisions
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

    /// Has `listener` hear of events from now on, unless the machine has ended.
    pub(crate) fn listen(&self, listener: Box<dyn Listen>) {
        self.hub.listen(listener);
    }

    /// A stream of the events of `filter`'s probes, or of all when it is empty, from now on. At
    /// most `capacity` events wait; then they are dropped and counted.
    #[must_use]
    pub fn subscribe(&self, filter: Vec<ProbeId>, capacity: usize) -> Subscription {
        self.hub.subscribe(filter, capacity)
    }

    /// Reads kernel memory as the guest has it now, our patches included.
    ///
    /// # Errors
    /// While booting, or when it is not mapped.
    pub fn read_kernel(&self, at: Gva, into: &mut [u8]) -> Result<(), ReadError> {
        let view = self.shared.control.view().ok_or(ReadError::Booting)?;
        Ok(view.tables.read(&*self.shared.ram, at, into)?)
    }

    /// How often KVM was called for each virtual CPU. Up to date while paused or stopped.
    #[must_use]
    pub fn ioctls(&self) -> Vec<Ioctls> {
        self.ioctls.iter().map(|totals| totals.get()).collect()
    }

    /// Host time, nanoseconds of `CLOCK_MONOTONIC`, at which the guest executed its first
    /// instruction.
    #[must_use]
    pub fn first_entry_ns(&self) -> Option<u64> {
        match self.shared.first_entry_ns.load(Ordering::Relaxed) {
            0 => None,
            ns => Some(ns),
        }
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // A panic inside a transaction leaves the registry at a step it can go on from: its
        // fields are updated only after the text was.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn throttle_looked(&self) -> MutexGuard<'_, Instant> {
        self.throttle_looked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
