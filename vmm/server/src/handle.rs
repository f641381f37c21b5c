//! One machine of a server, live or ended.
//!
//! Invariant: whatever changes of a machine is told to whoever follows it, or all of them; a call that is
//! stuck in it takes none of the threads that another machine's calls, or the stopping of this one, need.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_machine::{Machine, State};
use hvprobe_proto::v1;
use hvprobe_spec::ProbeId;
use prost::Message as _;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tonic::Status;

use super::events::broadcast::Broadcast;
use super::identity::Identity;
use super::news::News;
use super::requests::Requests;
use super::sessions::owners::Owners;
use super::status;
use super::threads::Lane;
use super::totals::Guest;
use super::wire::convert;

/// Calls into one machine that may be under way; more wait.
const CALLS: usize = 4;

/// One machine, live or ended. Copies are the same machine.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    name: Arc<str>,
    /// Counts boots, to know which machine is the oldest.
    pub(crate) number: u64,
    pub(crate) identity: Arc<Identity>,
    /// The requests for probes that can be told from others.
    pub(crate) requests: Arc<Requests>,
    /// Changes, or is touched, whenever the machine's state does.
    life: Arc<watch::Sender<Life>>,
    /// Who those are to whom its probes belong.
    owners: Owners,
    /// Its events, for the clients that want them.
    events: Broadcast,
    stopping: Arc<Mutex<Stopping>>,
    /// The changes of all machines, and the number of this one's last.
    news: News,
    changed: Arc<AtomicU64>,
    calls: Arc<Lane>,
    stops: Arc<Lane>,
    looks: Arc<Lane>,
}

#[derive(Clone, Debug)]
enum Life {
    Live(Arc<Machine>),
    Ended(Arc<Remains>),
}

/// The probes before the machine was told to stop, with their last counters.
#[derive(Debug, Default)]
enum Stopping {
    /// It was not told.
    #[default]
    No,
    Listed(Vec<v1::Probe>),
    /// It has ended.
    Over,
}

/// What is left of a machine that has ended.
#[derive(Debug)]
pub(crate) struct Remains {
    pub(crate) machine: v1::Machine,
    pub(crate) probes: Vec<v1::Probe>,
    /// The end of its console's output.
    pub(crate) console: Vec<u8>,
    /// How many bytes all that takes, as it is told.
    bytes: usize,
}

impl Remains {
    /// These.
    pub(crate) fn new(machine: v1::Machine, probes: Vec<v1::Probe>, console: Vec<u8>) -> Self {
        let told = machine.encoded_len() + console.len();
        let lengths = probes.iter().map(prost::Message::encoded_len);
        // Counted once: whoever looks for the oldest of all machines keeps others from finding theirs.
        let bytes = lengths.fold(told, usize::saturating_add);
        Self {
            machine,
            probes,
            console,
            bytes,
        }
    }
}

/// A machine's place among all.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) name: String,
    pub(crate) number: u64,
    pub(crate) identity: Identity,
    pub(crate) news: News,
    pub(crate) owners: Owners,
    pub(crate) events: Broadcast,
}

impl Handle {
    /// That of a machine that lives.
    pub(crate) fn live(place: Place, machine: &Arc<Machine>) -> Self {
        let handle = Self::of(place, Life::Live(Arc::clone(machine)));
        machine.listen(Box::new(handle.events.listener()));
        handle
    }

    /// That of one that has ended.
    #[cfg(test)]
    pub(crate) fn of_ended(place: Place, remains: Remains) -> Self {
        Self::of(place, Life::Ended(Arc::new(remains)))
    }

    fn of(place: Place, life: Life) -> Self {
        Self {
            name: place.name.into(),
            number: place.number,
            identity: Arc::new(place.identity),
            requests: Arc::default(),
            life: Arc::new(watch::Sender::new(life)),
            owners: place.owners,
            events: place.events,
            stopping: Arc::default(),
            news: place.news,
            changed: Arc::default(),
            calls: Arc::new(Lane::new("a call into a machine", CALLS)),
            stops: Arc::new(Lane::new("stopping a machine", 1)),
            looks: Arc::new(Lane::new("a look at sources", 1)),
        }
    }

    /// Returns when `machine`, which is this one, has ended and all who follow it are told. What it has of
    /// all that guests may have is given back with its memory.
    pub(crate) fn watch_over(&self, machine: Arc<Machine>, guest: Option<Guest>) {
        let mut status = machine.status();
        // Whoever looked at it sooner than that has not seen what has changed since.
        self.touch();
        while !matches!(status.state, State::Stopped(_)) {
            status = machine.wait_change(&status);
            // What it is now is asked by whoever is told.
            self.touch();
        }
        let stopping = std::mem::replace(&mut *lock(&self.stopping), Stopping::Over);
        let probes = match stopping {
            Stopping::Listed(probes) => probes,
            Stopping::No | Stopping::Over => self.listed(&machine),
        };
        let remains = Remains::new(self.told(&machine), probes, machine.console_kept());
        drop(machine);
        let ended = Life::Ended(Arc::new(remains));
        self.life.send_modify(|life| {
            *life = ended;
            drop(guest);
        });
        self.news.tell(|number| self.mark(number));
    }

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

    pub(crate) fn is_live(&self) -> bool {
        matches!(*self.life.borrow(), Life::Live(_))
    }

    /// Tells whoever follows the machine to look at its state again.
    pub(crate) fn touch(&self) {
        self.life.send_modify(|_| ());
        self.news.tell(|number| self.mark(number));
    }

    fn mark(&self, number: u64) {
        self.changed.store(number, Ordering::Release);
    }

    /// The number of its last change among those of all machines.
    pub(crate) fn changed(&self) -> u64 {
        self.changed.load(Ordering::Acquire)
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

    /// How many bytes it keeps, as they are told, if it has ended.
    pub(crate) fn kept_bytes(&self) -> Option<usize> {
        let remains = self.remains()?;
        Some(remains.bytes.saturating_add(self.events.held_bytes()))
    }

    /// Calls the machine on a thread that may block.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let machine = self.machine()?;
        self.aside(move || call(&machine)).await
    }

    /// Has `work` that has to do with the machine done on a thread that may block.
    pub(crate) async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        self.calls.run(work).await
    }

    /// The turn of whoever looks at the sources of the machine's kernel: one at a time.
    pub(crate) async fn turn_to_look(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.looks.turn().await
    }

    /// What is told of `machine`, which is this one.
    fn told(&self, machine: &Machine) -> v1::Machine {
        let mut told = convert::machine(machine);
        if told.ending.is_some() {
            // Whoever sees the end first sees when it was.
            self.identity.end();
        }
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

    /// The machine as it is now, or as it ended. Does not wait for what is done with it.
    pub(crate) fn describe(&self) -> v1::Machine {
        match self.life() {
            Life::Live(machine) => self.told(&machine),
            Life::Ended(remains) => remains.machine.clone(),
        }
    }

    /// What `of` makes of its probes as they are now, or as they were when it ended. There may be many of them, so
    /// that is done on a thread that may block.
    pub(crate) async fn probes<T: Send + 'static>(
        &self,
        of: impl FnOnce(Vec<v1::Probe>) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let (handle, life) = (self.clone(), self.life());
        let made = self.aside(move || {
            of(match life {
                Life::Live(machine) => handle.listed(&machine),
                Life::Ended(remains) => remains.probes.clone(),
            })
        });
        made.await
    }

    /// Takes its probes out and ends it. Nothing to do if it has ended.
    pub(crate) async fn stop(&self) -> Result<Arc<Remains>, Status> {
        let Life::Live(machine) = self.life() else {
            return Ok(self.ended().await);
        };
        let (handle, stopping) = (self.clone(), Arc::clone(&self.stopping));
        let stopped = self.stops.run(move || {
            // Once disabled, a probe counts no more: these are its last counters.
            let ids: Vec<_> = machine.probes().iter().map(|probe| probe.id).collect();
            if let Err(error) = machine.disable(&ids) {
                tracing::debug!(%error, "cannot disable the probes before stopping");
            }
            let listed = handle.listed(&machine);
            {
                let mut stopping = lock(&stopping);
                if matches!(*stopping, Stopping::No) {
                    *stopping = Stopping::Listed(listed);
                }
            }
            machine.stop();
        });
        // It may end by itself meanwhile.
        tokio::select! {
            remains = self.ended() => Ok(remains),
            stopped = stopped => {
                stopped?;
                Ok(self.ended().await)
            }
        }
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

fn lock(stopping: &Mutex<Stopping>) -> MutexGuard<'_, Stopping> {
    // It is only ever replaced as a whole.
    stopping.lock().unwrap_or_else(PoisonError::into_inner)
}
