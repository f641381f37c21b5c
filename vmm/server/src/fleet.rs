//! The machines of a server, by name.
//!
//! ```text
//!              boot fails
//!   reserved ─────────────► (free), or what had ended there
//!      │ boot succeeds
//!      ▼
//!    live ───────► ended ─────► (free): the name is taken again, or too many have ended
//!          guest ends
//! ```
//! What is kept true: a name belongs to one machine at a time, and from the moment its boot begins;
//! an ended machine keeps no guest memory, only what can be asked about it; after
//! [`Fleet::close`] nothing is live and nothing can be booted. The lock is never held while a
//! machine is called.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hvprobe_machine::{BootError, CpuError, Machine, MachineConfig, MemoryError, State};
use hvprobe_proto::v1::{self, ErrorKind};
use hvprobe_spec::ProbeId;
use tokio::sync::{Notify, watch};
use tonic::{Code, Status};

use super::arrivals::{Arrivals, Arriving};
use super::events::broadcast::Broadcast;
use super::identity::{Asked, Identity};
use super::limits;
use super::requests::Requests;
use super::sessions::owners::Owners;
use super::status::{self, Failure, broken, chain};
use super::wire::convert;

/// Machines that may be live or booting.
const LIVE: usize = 64;
/// Ended machines that are remembered.
const REMEMBERED: usize = 64;

/// All machines of a server. Copies are the same fleet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fleet {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    slots: Mutex<Slots>,
    owners: Owners,
    /// Told when a reservation is over.
    settled: Notify,
    /// Told of machines that have been booted.
    arrivals: Arrivals<Handle>,
}

#[derive(Debug, Default)]
struct Slots {
    closed: bool,
    next_number: u64,
    named: BTreeMap<String, Slot>,
}

#[derive(Debug)]
enum Slot {
    /// A boot is under way. Until it has succeeded, what ended before under the name is kept.
    Reserved {
        before: Option<Handle>,
        /// The id of the request for it; empty if it has none.
        request_id: String,
    },
    Taken(Handle),
}

/// One machine, live or ended.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    name: Arc<str>,
    /// Counts boots, to know which machine is the oldest.
    pub(crate) number: u64,
    identity: Arc<Identity>,
    /// The requests for probes that can be told from others.
    pub(crate) requests: Arc<Requests>,
    /// Changes, or is touched, whenever the machine's state does.
    life: Arc<watch::Sender<Life>>,
    /// Who those are to whom its probes belong.
    owners: Owners,
    /// Its events, for the clients that want them.
    events: Broadcast,
    /// The probes before the machine was told to stop, with their last counters.
    stopping: Arc<OnceLock<Vec<v1::Probe>>>,
}

#[derive(Clone, Debug)]
enum Life {
    Live(Arc<Machine>),
    Ended(Arc<Remains>),
}

/// What is left of a machine that has ended.
#[derive(Debug)]
pub(crate) struct Remains {
    pub(crate) machine: v1::Machine,
    pub(crate) probes: Vec<v1::Probe>,
    /// The end of its console's output.
    pub(crate) console: Vec<u8>,
}

impl Fleet {
    /// The machine called `name`.
    pub(crate) fn get(&self, name: &str) -> Result<Handle, Status> {
        match self.slots().named.get(name) {
            Some(Slot::Taken(handle)) => Ok(handle.clone()),
            Some(Slot::Reserved { .. }) => Err(status::booting(name)),
            None => Err(no_such_machine(name)),
        }
    }

    /// Who those are to whom probes of the machines belong.
    pub(crate) fn owners(&self) -> &Owners {
        &self.shared.owners
    }

    /// All machines, by name.
    pub(crate) fn all(&self) -> Vec<Handle> {
        let slots = self.slots();
        let taken = slots.named.values().filter_map(|slot| match slot {
            Slot::Taken(handle) => Some(handle.clone()),
            Slot::Reserved { before, .. } => before.clone(),
        });
        taken.collect()
    }

    /// The machines that have not ended, by name.
    pub(crate) fn live(&self) -> Vec<Handle> {
        let mut handles = self.all();
        handles.retain(Handle::is_live);
        handles
    }

    /// Tells of the machines that are booted from now on.
    pub(crate) fn arrivals(&self) -> Arriving<Handle> {
        self.shared.arrivals.follow()
    }

    /// Boots the machine that `config` describes; an empty name is replaced by a free one. Goes on
    /// if the caller is no longer there. If such a request has made one before, it is that one.
    pub(crate) async fn boot(
        &self,
        mut config: MachineConfig,
        asked: Asked,
    ) -> Result<Handle, Status> {
        let number = match self.reserve(&mut config.name, &asked.request_id)? {
            Reservation::Boot(number) => number,
            Reservation::Made(made) => return Ok(made),
        };
        let identity = Identity::new(asked).map_err(|error| {
            self.settle(&config.name, None);
            Status::internal(format!("the host gives no random number: {error}"))
        })?;
        let fleet = self.clone();
        let booting = tokio::spawn(async move {
            let name = config.name.clone();
            let booted = tokio::task::spawn_blocking(move || Machine::boot(config)).await;
            let booted = match booted {
                Ok(Ok(machine)) => Ok(fleet.take_up(&name, number, machine, identity)),
                Ok(Err(error)) => Err(boot_error(&name, &error)),
                Err(_) => Err(broken("the boot")),
            };
            fleet.settle(&name, booted.as_ref().ok());
            booted
        });
        booting.await.map_err(|_| broken("the boot"))?
    }

    /// Forgets the machine called `name`, which has ended.
    pub(crate) fn forget(&self, name: &str) -> Result<(), Status> {
        let mut slots = self.slots();
        match slots.named.get(name) {
            None => Err(no_such_machine(name)),
            Some(slot) if slot.is_live() => Err(Failure::new(
                Code::FailedPrecondition,
                ErrorKind::MachineRunning,
                format!("machine `{name}` has not ended: stop it first"),
            )
            .into()),
            Some(_) => {
                slots.named.remove(name);
                Ok(())
            }
        }
    }

    /// Takes `name` for the boot that this request asks for, unless it was made before; chooses one if it is
    /// empty.
    fn reserve(&self, name: &mut String, request_id: &str) -> Result<Reservation, Status> {
        let mut slots = self.slots();
        if let Some(made) = slots.made_by(request_id)? {
            return Ok(Reservation::Made(made));
        }
        if slots.closed {
            return Err(Status::unavailable("the server is stopping"));
        }
        if slots.named.values().filter(|slot| slot.is_live()).count() >= LIVE {
            return Err(Failure::new(
                Code::ResourceExhausted,
                ErrorKind::TooManyMachines,
                format!("there are {LIVE} machines already: stop one first"),
            )
            .into());
        }
        if name.is_empty() {
            let mut free = (0_u64..).map(|number| format!("vm{number}"));
            // Among more names than there can be machines, one is free.
            if let Some(free) = free.find(|name| !slots.named.contains_key(name)) {
                *name = free;
            }
        }
        limits::machine_name(name)?;
        let before = match slots.named.get(name) {
            Some(Slot::Taken(ended)) if !ended.is_live() => Some(ended.clone()),
            None => None,
            Some(Slot::Taken(_) | Slot::Reserved { .. }) => {
                return Err(Failure::new(
                    Code::AlreadyExists,
                    ErrorKind::MachineExists,
                    format!("there is a machine `{name}` already"),
                )
                .into());
            }
        };
        let reserved = Slot::Reserved {
            before,
            request_id: request_id.to_owned(),
        };
        slots.named.insert(name.clone(), reserved);
        slots.next_number += 1;
        Ok(Reservation::Boot(slots.next_number))
    }

    /// A handle for `machine`, which is watched until it ends.
    fn take_up(
        &self,
        name: &str,
        number: u64,
        machine: Arc<Machine>,
        identity: Identity,
    ) -> Handle {
        let handle = Handle {
            name: name.into(),
            number,
            identity: Arc::new(identity),
            requests: Arc::default(),
            life: Arc::new(watch::Sender::new(Life::Live(Arc::clone(&machine)))),
            owners: self.shared.owners.clone(),
            events: Broadcast::default(),
            stopping: Arc::default(),
        };
        machine.listen(Box::new(handle.events.listener()));
        let watched = handle.clone();
        tokio::task::spawn_blocking(move || {
            let mut status = machine.status();
            while !matches!(status.state, State::Stopped(_)) {
                status = machine.wait_change(&status);
                // What it is now is asked by whoever is told.
                watched.touch();
            }
            let probes = watched
                .stopping
                .get()
                .cloned()
                .unwrap_or_else(|| watched.listed(&machine));
            watched.identity.end();
            let remains = Remains {
                machine: watched.told(&machine),
                probes,
                console: machine.console_kept(),
            };
            watched.life.send_replace(Life::Ended(Arc::new(remains)));
        });
        handle
    }

    /// Ends the reservation of `name`, which becomes `machine`'s, or what it was before.
    fn settle(&self, name: &str, machine: Option<&Handle>) {
        let mut slots = self.slots();
        let before = match slots.named.remove(name) {
            Some(Slot::Reserved { before, .. }) => before,
            Some(Slot::Taken(handle)) => Some(handle),
            None => None,
        };
        if let Some(handle) = machine.cloned().or(before) {
            slots.named.insert(name.to_owned(), Slot::Taken(handle));
        }
        slots.forget_oldest();
        drop(slots);
        if let Some(machine) = machine {
            self.shared.arrivals.announce(machine);
        }
        self.shared.settled.notify_one();
    }

    /// Ends all machines, those being booted too, and lets none be booted any more.
    pub(crate) async fn close(&self) {
        loop {
            let (live, booting) = {
                let mut slots = self.slots();
                slots.closed = true;
                self.shared.arrivals.close();
                let reserved = |slot: &Slot| matches!(slot, Slot::Reserved { .. });
                let booting = slots.named.values().any(reserved);
                drop(slots);
                (self.live(), booting)
            };
            for handle in live {
                if let Err(error) = handle.stop().await {
                    tracing::error!(machine = handle.name(), %error, "cannot stop the machine");
                }
            }
            if !booting {
                return;
            }
            self.shared.settled.notified().await;
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.shared
            .slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    fn is_live(&self) -> bool {
        match self {
            Self::Reserved { .. } => true,
            Self::Taken(handle) => handle.is_live(),
        }
    }
}

/// What comes of asking for a machine.
#[derive(Debug)]
enum Reservation {
    /// The name is taken for it; this is the number of its boot.
    Boot(u64),
    /// The same request has made this one.
    Made(Handle),
}

impl Slots {
    /// The machine that the request of this id has made, unless it is still being booted.
    fn made_by(&self, wanted: &str) -> Result<Option<Handle>, Status> {
        for (name, slot) in &self.named {
            match slot {
                Slot::Reserved { request_id, .. } if !wanted.is_empty() && request_id == wanted => {
                    return Err(status::booting(name));
                }
                Slot::Taken(handle) if handle.identity.is_of(wanted) => {
                    return Ok(Some(handle.clone()));
                }
                Slot::Reserved { .. } | Slot::Taken(_) => {}
            }
        }
        Ok(None)
    }

    /// Forgets the oldest ended machines beyond those that are remembered.
    fn forget_oldest(&mut self) {
        let mut ended: Vec<_> = self
            .named
            .iter()
            .filter_map(|(name, slot)| match slot {
                Slot::Taken(handle) if !handle.is_live() => Some((handle.number, name.clone())),
                _ => None,
            })
            .collect();
        ended.sort_unstable();
        let excess = ended.len().saturating_sub(REMEMBERED);
        for (_, name) in ended.into_iter().take(excess) {
            self.named.remove(&name);
        }
    }
}

impl Handle {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What tells it from others of the name.
    pub(crate) fn uid(&self) -> &str {
        self.identity.uid()
    }

    /// Its events; there are none once it has ended.
    pub(crate) fn events(&self) -> &Broadcast {
        &self.events
    }

    fn is_live(&self) -> bool {
        matches!(*self.life.borrow(), Life::Live(_))
    }

    /// Tells whoever follows the machine to look at its state again.
    pub(crate) fn touch(&self) {
        self.life.send_modify(|_| ());
    }

    /// Follows the machine's state: changes whenever there is something new to see.
    pub(crate) fn follow(&self) -> watch::Receiver<impl Sized + use<>> {
        self.life.subscribe()
    }

    fn life(&self) -> Life {
        self.life.borrow().clone()
    }

    /// The machine, unless it has ended.
    pub(crate) fn machine(&self) -> Result<Arc<Machine>, Status> {
        match self.life() {
            Life::Live(machine) => Ok(machine),
            Life::Ended(_) => Err(status::ended(&self.name)),
        }
    }

    /// What is left of the machine, if it has ended.
    pub(crate) fn remains(&self) -> Option<Arc<Remains>> {
        match self.life() {
            Life::Live(_) => None,
            Life::Ended(remains) => Some(remains),
        }
    }

    /// Calls the machine on a thread that may block.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let machine = self.machine()?;
        tokio::task::spawn_blocking(move || call(&machine))
            .await
            .map_err(|_| broken("a call into a machine"))
    }

    /// What is told of `machine`, which is this one.
    fn told(&self, machine: &Machine) -> v1::Machine {
        let mut told = convert::machine(machine);
        self.identity.tell(&mut told);
        let owners = machine.paused_by();
        let sessions = owners.iter().filter_map(|owner| self.owners.get(*owner));
        told.paused_by = sessions.map(|named| named.session.to_string()).collect();
        told
    }

    /// The probes of `machine`, which is this one, and to whom they belong.
    fn listed(&self, machine: &Machine) -> Vec<v1::Probe> {
        let mut probes = convert::probes(machine);
        let owners = machine.owners();
        for probe in &mut probes {
            let owner = owners.get(&ProbeId(probe.id));
            if let Some(named) = owner.and_then(|owner| self.owners.get(*owner)) {
                probe.owner = named.owner.to_string();
                probe.session = named.session.to_string();
            }
        }
        probes
    }

    /// Whether it has all of these labels.
    pub(crate) fn has(&self, labels: &BTreeMap<String, String>) -> bool {
        self.identity.has(labels)
    }

    /// The machine as it is now, or as it ended.
    pub(crate) async fn describe(&self) -> Result<v1::Machine, Status> {
        match self.life() {
            Life::Live(_) => {
                let handle = self.clone();
                self.blocking(move |machine| handle.told(machine)).await
            }
            Life::Ended(remains) => Ok(remains.machine.clone()),
        }
    }

    /// Its probes as they are now, or as they were when it ended.
    pub(crate) async fn probes(&self) -> Result<Vec<v1::Probe>, Status> {
        match self.life() {
            Life::Live(_) => {
                let handle = self.clone();
                self.blocking(move |machine| handle.listed(machine)).await
            }
            Life::Ended(remains) => Ok(remains.probes.clone()),
        }
    }

    /// Takes its probes out and ends it. Nothing to do if it has ended.
    pub(crate) async fn stop(&self) -> Result<Arc<Remains>, Status> {
        if let Life::Live(machine) = self.life() {
            let (handle, stopping) = (self.clone(), Arc::clone(&self.stopping));
            tokio::task::spawn_blocking(move || {
                // Once disabled, a probe counts no more: these are its last counters.
                let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
                if let Err(error) = machine.disable(&ids) {
                    tracing::debug!(%error, "cannot disable the probes before stopping");
                }
                stopping.get_or_init(|| handle.listed(&machine));
                machine.stop()
            })
            .await
            .map_err(|_| broken("stopping a machine"))?;
        }
        Ok(self.ended().await)
    }

    /// Returns when the machine has ended.
    pub(crate) async fn ended(&self) -> Arc<Remains> {
        let mut life = self.life.subscribe();
        loop {
            if let Life::Ended(remains) = &*life.borrow_and_update() {
                return Arc::clone(remains);
            }
            if life.changed().await.is_err() {
                // This handle has the sender, so it is still there.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Nobody is called `name`.
fn no_such_machine(name: &str) -> Status {
    // A name that cannot be one is not worth repeating.
    let message = match limits::machine_name(name) {
        Ok(()) => format!("there is no machine `{name}`"),
        Err(bad) => return bad,
    };
    Failure::new(Code::NotFound, ErrorKind::NoSuchMachine, message).into()
}

/// Why a boot failed, for clients.
fn boot_error(machine: &str, error: &BootError) -> Status {
    let (code, kind) = match error {
        BootError::Probe(error) => return status::register_error(machine, error),
        BootError::Load(_)
        | BootError::Initrd { .. }
        | BootError::Image(_)
        | BootError::NoTripwire(_)
        | BootError::Memory(MemoryError::TooSmall { .. } | MemoryError::TooLarge { .. })
        | BootError::Cpu(CpuError::Count { .. }) => (Code::InvalidArgument, ErrorKind::BadMachine),
        BootError::Memory(_)
        | BootError::Host(_)
        | BootError::NoCatchMode
        | BootError::Kvm { .. }
        | BootError::Cpu(_)
        | BootError::Acpi(_)
        | BootError::Thread(_) => (Code::FailedPrecondition, ErrorKind::Host),
    };
    Failure::new(code, kind, chain(error)).into()
}

#[cfg(test)]
mod tests;
