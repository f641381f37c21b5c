//! The machines of a server.
//!
//! Invariants: the resources of a guest are taken from the totals before anything is allocated for it, and released
//! if its boot fails; an ended machine keeps no guest memory, only what clients can still ask for; after
//! [`Fleet::close`] no machine can be booted, and none is live unless it hangs in the host. The lock on the names
//! is never held while a machine is called. Each machine has one thread here, which boots it and then waits for its
//! end.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use hvprobe_machine::{BootError, CpuError, Machine, MachineConfig, MemoryError};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use hvprobe_spec::chain;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};

use super::arrivals::{Arrivals, Arriving};
use super::change_counter::ChangeCounter;
use super::handle::{Handle, Place};
use super::identity::{Asked, Identity};
use super::slots::{Made, Slots};
use crate::bounds::boot_files::{self, Reading};
use crate::bounds::server_limits::Limits;
use crate::bounds::threads;
use crate::bounds::totals::{Guest, Totals};
use crate::events::broadcast::Broadcast;
use crate::sessions::owners::Owners;
use crate::status::{self, broken};

/// How long a stopping server waits for its machines to end, and for boots under way. A machine or boot that
/// takes longer hangs in the host, and ends with the process.
const ENDS: Duration = Duration::from_secs(10);

/// All machines of a server. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fleet {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    slots: Mutex<Slots>,
    owners: Owners,
    /// Announces machines that have been booted.
    arrivals: Arrivals<Handle>,
    /// Notified when a reservation ends.
    settled: Notify,
    totals: Arc<Totals>,
    /// Memory for the files that boots read.
    reading: Reading,
    changes: ChangeCounter,
    /// Time until which a stopping server waits; set when it begins to stop.
    no_longer: OnceLock<Instant>,
    /// Set once the machines or boots that hang have been logged.
    left: OnceLock<()>,
}

/// Result of a request for a machine.
#[derive(Debug)]
enum Reservation {
    /// The name is reserved for it.
    Boot(Reserved),
    /// The same request has already created this machine.
    Made(Handle),
    /// The same request is under way.
    UnderWay,
}

/// A name that is reserved for a machine, until the reservation is settled or dropped.
#[derive(Debug)]
struct Reserved {
    fleet: Fleet,
    name: String,
    number: u64,
    /// `None` once the reservation is settled.
    guest: Option<Guest>,
}

impl Fleet {
    /// Creates a fleet with these limits.
    pub(crate) fn new(limits: Limits) -> Self {
        let shared = Shared {
            totals: Arc::new(Totals::new(limits)),
            ..Shared::default()
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Returns the use of the server's resources.
    pub(crate) fn totals(&self) -> &Arc<Totals> {
        &self.shared.totals
    }

    /// Returns the machine called `name`.
    pub(crate) fn get(&self, name: &str) -> Result<Handle, Status> {
        self.slots().get(name)
    }

    /// Returns the sessions of the server, by owner number.
    pub(crate) fn owners(&self) -> &Owners {
        &self.shared.owners
    }

    /// Subscribes to the machines that are booted from now on.
    pub(crate) fn arrivals(&self) -> Arriving<Handle> {
        self.shared.arrivals.follow()
    }

    /// Returns all machines, ordered by name.
    pub(crate) fn all(&self) -> Vec<Handle> {
        self.slots().all()
    }

    /// Returns the machines that have not ended, ordered by name.
    pub(crate) fn live(&self) -> Vec<Handle> {
        let mut handles = self.all();
        handles.retain(Handle::is_live);
        handles
    }

    /// Follows all machines: the receiver changes when a machine is added, changes or is removed.
    pub(crate) fn follow(&self) -> watch::Receiver<u64> {
        self.shared.changes.follow()
    }

    /// Boots the machine that `config` describes, under a free name if the name in `config` is empty. The boot
    /// continues if the caller is gone. If the same request has created a machine before, returns that machine.
    pub(crate) async fn boot(&self, config: MachineConfig, asked: Asked) -> Result<Handle, Status> {
        self.boot_by(config, asked, Machine::boot).await
    }

    /// Like [`Fleet::boot`], but boots the machine with the function `boot`.
    async fn boot_by(
        &self,
        mut config: MachineConfig,
        asked: Asked,
        boot: impl FnOnce(MachineConfig) -> Result<Arc<Machine>, BootError> + Send + 'static,
    ) -> Result<Handle, Status> {
        let mut changes = self.follow();
        let reserved = loop {
            match self.reserve(&mut config, &asked)? {
                Reservation::Boot(reserved) => break reserved,
                Reservation::Made(made) => return Ok(made),
                // The request under way creates the machine, or fails and makes this request the first.
                Reservation::UnderWay => changes.changed().await.map_err(|_| broken("the boot"))?,
            }
        };
        let identity = Identity::new(asked).map_err(|error| {
            Status::internal(format!("the host gives no random number: {error}"))
        })?;
        let (to, is_booted) = oneshot::channel();
        threads::start("a machine", move || {
            let shared = Arc::clone(&reserved.fleet.shared);
            let reading = shared.reading.wait(boot_files::length(&config));
            let booted = boot(config);
            drop(reading);
            let machine = match booted {
                Ok(machine) => machine,
                Err(error) => {
                    let error = boot_error(&reserved.name, &error);
                    drop(reserved);
                    // The caller may be gone.
                    let _gone = to.send(Err(error));
                    return;
                }
            };
            let fleet = reserved.fleet.clone();
            let (handle, guest) = reserved.settle(machine, identity);
            let _gone = to.send(Ok(handle.clone()));
            let is_closed = fleet.slots().closed;
            // The server stopped during the boot, so the machine is not wanted any more.
            if is_closed && let Ok(port) = handle.port() {
                port.stop();
            }
            handle.watch_over(guest);
            fleet.forget_oldest();
            // This comes last because it waits for the request under way.
            handle.requests.forget();
        })?;
        is_booted.await.map_err(|_| broken("the boot"))?
    }

    /// Removes the ended machine called `name` from the list.
    pub(crate) fn forget(&self, name: &str) -> Result<(), Status> {
        self.slots().forget(name)?;
        self.shared.changes.publish(|_| ());
        Ok(())
    }

    /// Reserves a name, memory and virtual CPUs for this request, unless the same request was made before. If
    /// `config` has no name, chooses one.
    fn reserve(&self, config: &mut MachineConfig, asked: &Asked) -> Result<Reservation, Status> {
        let mut slots = self.slots();
        match slots.made_by(asked)? {
            Made::Nothing => {}
            Made::UnderWay => return Ok(Reservation::UnderWay),
            Made::Machine(made) => return Ok(Reservation::Made(made)),
        }
        let totals = &self.shared.totals;
        slots.can_reserve(&mut config.name, totals.limits())?;
        config.bounds = totals.limits().each;
        let guest = totals.guest(config.memory, config.cpus)?;
        Ok(Reservation::Boot(Reserved {
            fleet: self.clone(),
            name: config.name.clone(),
            number: slots.reserve(&config.name, asked),
            guest: Some(guest),
        }))
    }

    fn forget_oldest(&self) {
        let forgotten = self.slots().forget_oldest(self.shared.totals.limits());
        if forgotten > 0 {
            self.shared.changes.publish(|_| ());
        }
    }

    /// Ends all machines at once, including those being booted, and refuses further boots. Waits for them at most
    /// for [`ENDS`], in all calls together.
    pub(crate) async fn close(&self) {
        let no_longer = &self.shared.no_longer;
        let no_longer = *no_longer.get_or_init(|| Instant::now() + ENDS);
        loop {
            let booting = {
                let mut slots = self.slots();
                slots.closed = true;
                self.shared.arrivals.close();
                slots.is_booting()
            };
            self.shared.changes.publish(|_| ());
            let stopping = at_once(self.live(), |handle| async move {
                if let Err(error) = handle.stop().await {
                    tracing::error!(machine = handle.name(), %error, "cannot stop the machine");
                }
            });
            if timeout_at(no_longer, stopping).await.is_err() {
                self.shared.left.get_or_init(|| {
                    for stuck in self.live() {
                        let machine = stuck.name();
                        tracing::error!(
                            machine,
                            "does not end, and is left to end with the process"
                        );
                    }
                });
                return;
            }
            if !booting {
                return;
            }
            let settled = self.shared.settled.notified();
            if timeout_at(no_longer, settled).await.is_err() {
                self.shared.left.get_or_init(|| {
                    tracing::error!("a boot hangs, and is left to end with the process");
                });
                return;
            }
        }
    }

    /// Whether there is no live machine, and there will be none.
    pub(crate) fn is_over(&self) -> bool {
        let slots = self.slots();
        let mut all = slots.all().into_iter();
        slots.closed && !slots.is_booting() && !all.any(|handle| handle.is_live())
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.shared
            .slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls `stop` for all of `machines` at the same time, and waits until all calls are done.
async fn at_once<M, F>(machines: impl IntoIterator<Item = M>, stop: impl Fn(M) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut stopping: JoinSet<()> = machines.into_iter().map(stop).collect();
    while let Some(stopped) = stopping.join_next().await {
        if let Err(error) = stopped {
            tracing::error!(%error, "cannot stop a machine");
        }
    }
}

impl Reserved {
    /// Assigns the name to `machine`. Returns its handle, and the resources that were taken for it.
    fn settle(mut self, machine: Arc<Machine>, identity: Identity) -> (Handle, Option<Guest>) {
        let shared = &self.fleet.shared;
        let place = Place {
            name: self.name.clone(),
            number: self.number,
            identity,
            changes: shared.changes.clone(),
            owners: shared.owners.clone(),
            events: Broadcast::within(shared.totals.events.clone()),
        };
        let handle = Handle::live(place, machine);
        let guest = self.guest.take();
        self.end(Some(&handle));
        (handle, guest)
    }

    /// Ends the reservation with `machine`, or without one.
    fn end(&self, machine: Option<&Handle>) {
        let shared = &self.fleet.shared;
        self.fleet.slots().settle(&self.name, machine);
        match machine {
            Some(handle) => {
                shared.arrivals.announce(handle);
                handle.touch();
            }
            None => shared.changes.publish(|_| ()),
        }
        self.fleet.forget_oldest();
        shared.settled.notify_one();
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.guest.take().is_some() {
            self.end(None);
        }
    }
}

/// Converts the error of a boot for clients.
fn boot_error(machine: &str, error: &BootError) -> Status {
    let (code, kind) = match error {
        _ if error.is_exhausted() => (Code::ResourceExhausted, ErrorKind::Host),
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
        | BootError::Device(_)
        | BootError::Acpi(_)
        | BootError::Thread(_) => (Code::FailedPrecondition, ErrorKind::Host),
    };
    Failure::new(code, kind, chain(error)).into()
}

#[cfg(test)]
pub(crate) mod tests;
