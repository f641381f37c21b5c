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

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hvprobe_arch::Gva;
use hvprobe_arch::paging::WalkError;
use hvprobe_engine::{Refused, Registry, Skipped, Standing, StopError};
use hvprobe_hit::aggregate::Room;
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
use crate::vcpu::shared::{IoctlTotals, Shared};

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
pub(crate) struct Life {
    pub(crate) live: bool,
    /// The guest has left the kernel it was booted with.
    pub(crate) kernel_replaced: bool,
    pub(crate) ending: Option<Ending>,
}

/// One guest with its probes. All methods may be called from any thread; they block.
#[derive(Debug)]
pub struct Machine {
    pub(crate) config: MachineConfig,
    pub(crate) mode: CatchMode,
    pub(crate) image: Arc<KernelImage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) registry: Mutex<Registry>,
    /// Whether the global switch of `registry` is on.
    pub(crate) armed: AtomicBool,
    /// Probes of the configuration that were refused before the boot, and left out.
    pub(crate) skipped: Vec<Skipped>,
    pub(crate) console: Arc<ConsoleOutput>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) flush: Flush,
    /// Held once more by each histogram.
    pub(crate) aggregations: Arc<()>,
    /// What all of them have together.
    pub(crate) histograms: Arc<Room>,
    pub(crate) ioctls: Vec<Arc<IoctlTotals>>,
    /// When it was last looked for hits that were throttled; after `registry`.
    pub(crate) throttle_looked: Mutex<Instant>,
    pub(crate) life: Mutex<Life>,
    pub(crate) changed: Condvar,
}

impl Machine {
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
            stopped_at: self.shared.claims().stopped_at(),
            kernel_replaced: life.kernel_replaced,
        }
    }

    /// Blocks until it is doing something else than `last` says; tells what.
    #[must_use]
    pub fn wait_change(&self, last: &Status) -> Status {
        self.wait_for(|life| Some(self.status_in(life)).filter(|status| status != last))
    }

    /// Blocks until `found` finds something.
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

    /// Its status has changed in what is not guarded by `life`.
    pub(crate) fn tell_change(&self) {
        // Whoever looked at the status before now waits to be told.
        drop(self.life());
        self.changed.notify_all();
    }

    /// Blocks until the kernel's text is final and its pending probes are planted, or the machine
    /// has ended; tells which by its status.
    #[must_use]
    pub fn wait_live(&self) -> Status {
        self.wait_for(|life| (life.live || life.ending.is_some()).then(|| self.status_in(life)))
    }

    /// Blocks until the machine has ended.
    #[must_use]
    pub fn wait(&self) -> Ending {
        self.wait_for(|life| life.ending.clone())
    }

    /// Stops all virtual CPUs until [`Machine::resume`]; they have stopped when this returns.
    /// Pausing a paused machine changes nothing.
    ///
    /// # Errors
    /// When the machine has ended or a virtual CPU does not stop.
    pub fn pause(&self) -> Result<(), PauseError> {
        self.pause_for(None)
    }

    /// As [`Machine::pause`], but it lasts no longer than `owner` is there. A machine that is paused for
    /// several goes on when nobody is left.
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
        self.tell_change();
        Ok(())
    }

    /// For whom it is paused, if for anybody in particular.
    #[must_use]
    pub fn paused_by(&self) -> Vec<Owner> {
        self.shared.claims().paused_by()
    }

    /// Whether anything of it belongs to `owner`. Waits for nobody.
    #[must_use]
    pub fn belongs_to(&self, owner: Owner) -> bool {
        self.shared.claims().has(owner)
    }

    /// Lets the virtual CPUs go on. Resuming a running machine changes nothing.
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

    /// The probes of the configuration that were refused before the boot, and left out.
    #[must_use]
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// The questions that hits put to clients.
    #[must_use]
    pub fn decisions(&self) -> &Decisions {
        &self.shared.decisions
    }

    /// Has `listener` hear of events from now on, unless the machine has ended.
    pub fn listen(&self, listener: Box<dyn Listen>) {
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

    /// The types of modules, as the guest has them loaded now, by their names: those in `wanted`, each of which
    /// stands at a position of what was asked for.
    ///
    /// # Errors
    /// The position of the first that is not loaded, or that nothing tells the types of, and why.
    pub fn module_types(
        &self,
        wanted: &[(usize, String)],
    ) -> Result<BTreeMap<String, Arc<Types>>, (usize, Refused)> {
        self.registry().module_types(wanted, &*self.shared.ram)
    }

    /// The module of the guest in whose memory `at` is now; `None` as well if that cannot be told.
    #[must_use]
    pub fn module_at(&self, at: Gva) -> Option<Module> {
        self.registry().module_at(at, &*self.shared.ram)
    }

    /// The build id of `module`, as the guest has it loaded, if its kernel keeps that.
    #[must_use]
    pub fn build_id(&self, module: &Module) -> Option<Vec<u8>> {
        self.registry().build_id(module, &*self.shared.ram)
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

    /// Where each virtual CPU stands, which are stopped for that; those that have not been started
    /// stand nowhere.
    ///
    /// # Errors
    /// When the machine has ended or a virtual CPU does not stop.
    pub fn standings(&self) -> Result<Vec<Standing>, StopError> {
        let mut all = Vec::new();
        self.shared.control.transact(|standings| {
            all.extend_from_slice(standings);
            None
        })?;
        Ok(all)
    }

    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        // A panic inside a transaction leaves the registry at a step it can go on from: its
        // fields are updated only after the text was.
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
