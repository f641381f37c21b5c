//! One machine of a server, live or ended.
//!
//! Invariants: every change of a machine is reported to the followers of that machine and of all machines; a call
//! that is stuck in the machine takes no thread that a call into another machine needs, or that stopping this
//! machine needs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_machine::Machine;
use hvprobe_proto::v1::{self, RegisterResponse};
use hvprobe_spec::ProbeId;
use prost::Message as _;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tonic::Status;

use super::change_counter::ChangeCounter;
use super::identity::Identity;
use super::port::Port;
use super::requests::Requests;
use crate::bounds::threads::Lane;
use crate::bounds::totals::Guest;
use crate::events::broadcast::Broadcast;
use crate::sessions::owners::Owners;
use crate::status;
use crate::wire::registration;

/// Maximum number of calls that run in one machine at a time; further ones wait.
const CALLS: usize = 4;

/// One machine, live or ended. Clones refer to the same machine.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    name: Arc<str>,
    /// Number of the boot, to know which machine is the oldest.
    pub(crate) number: u64,
    pub(crate) identity: Arc<Identity>,
    /// Answers to the requests for probes, for clients that repeat a request.
    pub(crate) requests: Arc<Requests>,
    /// The live or ended machine. Receivers are notified whenever the machine's state changes.
    life: Arc<watch::Sender<Life>>,
    /// Sessions of the server, by owner number.
    owners: Owners,
    /// Its events, for subscribers.
    events: Broadcast,
    stopping: Arc<Mutex<Stopping>>,
    /// Counter of the changes of all machines.
    changes: ChangeCounter,
    /// Number of this machine's last change.
    changed: Arc<AtomicU64>,
    calls: Arc<Lane>,
    stops: Arc<Lane>,
    looks: Arc<Lane>,
}

#[derive(Clone, Debug)]
enum Life {
    Live(Port),
    Ended(Arc<Remains>),
}

/// Progress of stopping a machine.
#[derive(Debug, Default)]
enum Stopping {
    /// The machine is not being stopped.
    #[default]
    No,
    /// The machine is being stopped: its probes, listed before that, with their last counters.
    Listed(Vec<v1::Probe>),
    /// The machine has ended.
    Over,
}

/// Data of an ended machine that clients can still read.
#[derive(Debug)]
pub(crate) struct Remains {
    pub(crate) machine: v1::Machine,
    pub(crate) probes: Vec<v1::Probe>,
    /// Result of registering the probes of the boot.
    registered: RegisterResponse,
    /// Last part of its console output.
    pub(crate) console: Vec<u8>,
    /// Size of all this in bytes; messages count with their encoded length.
    bytes: usize,
}

impl Remains {
    /// Creates the remains and computes their size.
    pub(crate) fn new(
        machine: v1::Machine,
        probes: Vec<v1::Probe>,
        registered: RegisterResponse,
        console: Vec<u8>,
    ) -> Self {
        let others = machine.encoded_len() + registered.encoded_len() + console.len();
        let lengths = probes.iter().map(prost::Message::encoded_len);
        // Computed once, because the search for the oldest machine holds the lock on the names of all machines.
        let bytes = lengths.fold(others, usize::saturating_add);
        Self {
            machine,
            probes,
            registered,
            console,
            bytes,
        }
    }
}

/// Everything in a handle that does not depend on the state of the machine.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) name: String,
    pub(crate) number: u64,
    pub(crate) identity: Identity,
    pub(crate) changes: ChangeCounter,
    pub(crate) owners: Owners,
    pub(crate) events: Broadcast,
}

impl Handle {
    /// Creates the handle of a live machine.
    pub(crate) fn live(place: Place, machine: Arc<Machine>) -> Self {
        let calls = lane();
        let name = place.name.as_str().into();
        let port = Port::new(name, machine, Arc::clone(&calls));
        port.listen(Box::new(place.events.listener()));
        Self::of(place, Life::Live(port), calls)
    }

    /// Creates the handle of an ended machine.
    #[cfg(test)]
    pub(crate) fn of_ended(place: Place, remains: Remains) -> Self {
        Self::of(place, Life::Ended(Arc::new(remains)), lane())
    }

    fn of(place: Place, life: Life, calls: Arc<Lane>) -> Self {
        Self {
            name: place.name.into(),
            number: place.number,
            identity: Arc::new(place.identity),
            requests: Arc::default(),
            life: Arc::new(watch::Sender::new(life)),
            owners: place.owners,
            events: place.events,
            stopping: Arc::default(),
            changes: place.changes,
            changed: Arc::default(),
            calls,
            stops: Arc::new(Lane::new("stopping a machine", 1)),
            looks: Arc::new(Lane::new("a look at sources", 1)),
        }
    }

    /// Waits until its machine has ended, and notifies the followers of every change. Then keeps only the remains,
    /// and releases the resources of `guest` together with the machine's memory.
    pub(crate) fn watch_over(&self, guest: Option<Guest>) {
        let Life::Live(port) = self.life() else {
            return;
        };
        // Followers ask for the current state themselves.
        port.follow(|| self.touch());
        let stopping = std::mem::replace(&mut *lock(&self.stopping), Stopping::Over);
        let probes = match stopping {
            Stopping::Listed(probes) => probes,
            Stopping::No | Stopping::Over => self.listed(&port),
        };
        let remains = Remains::new(
            self.describe_live(&port),
            probes,
            registration::response(port.registered()),
            port.console_kept(),
        );
        drop(port);
        let ended = Life::Ended(Arc::new(remains));
        self.life.send_modify(|life| {
            *life = ended;
            drop(guest);
        });
        self.changes.publish(|number| self.mark(number));
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the UUID of the machine, which no other machine of its name has.
    pub(crate) fn uid(&self) -> &str {
        self.identity.uid()
    }

    /// Returns its events; no new ones arrive once it has ended.
    pub(crate) fn events(&self) -> &Broadcast {
        &self.events
    }

    pub(crate) fn is_live(&self) -> bool {
        matches!(*self.life.borrow(), Life::Live(_))
    }

    /// Notifies the followers of the machine that its state may have changed.
    pub(crate) fn touch(&self) {
        self.life.send_modify(|_| ());
        self.changes.publish(|number| self.mark(number));
    }

    fn mark(&self, number: u64) {
        self.changed.store(number, Ordering::Release);
    }

    /// Returns the number of its last change. Numbers are given to the changes of all machines in their order.
    pub(crate) fn changed(&self) -> u64 {
        self.changed.load(Ordering::Acquire)
    }

    /// Follows the machine's state: the receiver changes whenever the state may have changed.
    pub(crate) fn follow(&self) -> watch::Receiver<impl Sized + use<>> {
        self.life.subscribe()
    }

    fn life(&self) -> Life {
        self.life.borrow().clone()
    }

    /// Returns the port to its machine, unless that has ended.
    pub(crate) fn port(&self) -> Result<Port, Status> {
        match self.life() {
            Life::Live(port) => Ok(port),
            Life::Ended(_) => Err(status::ended(&self.name)),
        }
    }

    /// Returns the remains of the machine, if it has ended.
    pub(crate) fn remains(&self) -> Option<Arc<Remains>> {
        match self.life() {
            Life::Live(_) => None,
            Life::Ended(remains) => Some(remains),
        }
    }

    /// Returns the size of its remains and its held events in bytes, if it has ended.
    pub(crate) fn kept_bytes(&self) -> Option<usize> {
        let remains = self.remains()?;
        Some(remains.bytes.saturating_add(self.events.held_bytes()))
    }

    /// Runs `work`, which concerns the machine and may block, on one of the machine's threads for calls.
    pub(crate) async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        self.calls.run(work).await
    }

    /// Waits for the permit to read the debug information of the machine's kernel. Each machine has one such
    /// permit.
    pub(crate) async fn turn_to_look(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.looks.turn().await
    }

    /// Describes the machine at `port`, which belongs to this handle.
    fn describe_live(&self, port: &Port) -> v1::Machine {
        let mut description = port.describe();
        if description.ending.is_some() {
            // The first caller that sees the end sets the time of the end.
            self.identity.end();
        }
        self.identity.fill(&mut description);
        let owners = port.paused_by();
        let sessions = owners.iter().filter_map(|owner| self.owners.get(*owner));
        description.paused_by = sessions.map(|named| named.session.to_string()).collect();
        description
    }

    /// Lists the probes of the machine at `port`, which belongs to this handle, with their owners.
    fn listed(&self, port: &Port) -> Vec<v1::Probe> {
        let mut probes = port.probes();
        let owners = port.owners();
        for probe in &mut probes {
            let owner = owners.get(&ProbeId(probe.id));
            if let Some(named) = owner.and_then(|owner| self.owners.get(*owner)) {
                probe.owner = named.owner.to_string();
                probe.session = named.session.to_string();
            }
        }
        probes
    }

    /// Whether the machine has all of these labels.
    pub(crate) fn has(&self, labels: &BTreeMap<String, String>) -> bool {
        self.identity.has(labels)
    }

    /// Describes the machine as it is now, or as it ended. Does not wait for calls into the machine.
    pub(crate) fn describe(&self) -> v1::Machine {
        match self.life() {
            Life::Live(port) => self.describe_live(&port),
            Life::Ended(remains) => remains.machine.clone(),
        }
    }

    /// Returns the result of registering the probes that it was booted with.
    pub(crate) fn registered(&self) -> RegisterResponse {
        match self.life() {
            Life::Live(port) => registration::response(port.registered()),
            Life::Ended(remains) => remains.registered.clone(),
        }
    }

    /// Calls `of` with its probes as they are now, or as they were when it ended. There may be many probes, so
    /// the call runs on a thread that may block.
    pub(crate) async fn probes<T: Send + 'static>(
        &self,
        of: impl FnOnce(Vec<v1::Probe>) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let (handle, life) = (self.clone(), self.life());
        let made = self.aside(move || {
            of(match life {
                Life::Live(port) => handle.listed(&port),
                Life::Ended(remains) => remains.probes.clone(),
            })
        });
        made.await
    }

    /// Disables its probes and stops it. Returns at once if it has ended.
    pub(crate) async fn stop(&self) -> Result<Arc<Remains>, Status> {
        let Life::Live(port) = self.life() else {
            return Ok(self.ended().await);
        };
        let (handle, stopping) = (self.clone(), Arc::clone(&self.stopping));
        let stopped = self.stops.run(move || {
            // A disabled probe counts nothing, so these are its last counters.
            if let Err(error) = port.disable_all() {
                tracing::debug!(%error, "cannot disable the probes before stopping");
            }
            let listed = handle.listed(&port);
            {
                let mut stopping = lock(&stopping);
                if matches!(*stopping, Stopping::No) {
                    *stopping = Stopping::Listed(listed);
                }
            }
            port.stop();
        });
        // The machine may end by itself meanwhile.
        tokio::select! {
            remains = self.ended() => Ok(remains),
            stopped = stopped => {
                stopped?;
                Ok(self.ended().await)
            }
        }
    }

    /// Waits until the machine has ended, and returns its remains.
    pub(crate) async fn ended(&self) -> Arc<Remains> {
        let mut life = self.life.subscribe();
        loop {
            if let Life::Ended(remains) = &*life.borrow_and_update() {
                return Arc::clone(remains);
            }
            if life.changed().await.is_err() {
                // Cannot happen: this handle owns the sender.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Creates the permits for calls into one machine.
fn lane() -> Arc<Lane> {
    Arc::new(Lane::new("a call into a machine", CALLS))
}

fn lock(stopping: &Mutex<Stopping>) -> MutexGuard<'_, Stopping> {
    // The value is only ever replaced as a whole, so a panic leaves it consistent.
    stopping.lock().unwrap_or_else(PoisonError::into_inner)
}
