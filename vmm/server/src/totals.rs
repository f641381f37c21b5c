//! What all machines and clients of a server have taken, and whether there is more.
//!
//! Invariant: what is taken never exceeds what is [allowed](Limits), and is given back when what was given
//! for it goes; nothing is given before it has been taken here.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_machine::queue::Pool;
use hvprobe_proto::v1::ErrorKind;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Code;

use super::allowed::Limits;
use super::status::Failure;

/// Which part of the room for events lists may have: a quarter.
const LISTS: usize = 4;

/// What a server has given out.
#[derive(Debug)]
pub(crate) struct Totals {
    limits: Limits,
    guests: Mutex<Guests>,
    pub(crate) connections: Places,
    pub(crate) tcp_connections: Places,
    pub(crate) streams: Places,
    pub(crate) subscribers: Places,
    /// Where events that wait for clients have their room.
    pub(crate) events: Pool,
    /// What of that the lists and filters of subscriptions may have together, so that those of a few clients do not
    /// leave the events of all others without room.
    pub(crate) lists: Pool,
}

/// What guests have.
#[derive(Clone, Copy, Debug, Default)]
struct Guests {
    memory: u64,
    cpus: u32,
}

impl Default for Totals {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl Totals {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            guests: Mutex::default(),
            connections: Places::new(
                limits.connections,
                ErrorKind::TooManyConnections,
                "connections to",
                "connections",
            ),
            tcp_connections: Places::new(
                limits.tcp_connections,
                ErrorKind::TooManyConnections,
                "connections to the TCP port of",
                "tcp_connections",
            ),
            streams: Places::new(
                limits.streams,
                ErrorKind::TooManyStreams,
                "streams of",
                "streams",
            ),
            subscribers: Places::new(
                limits.subscribers,
                ErrorKind::TooManySubscribers,
                "subscriptions to events of",
                "subscribers",
            ),
            events: Pool::new(limits.event_bytes),
            lists: Pool::new(limits.event_bytes / LISTS),
            limits,
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes memory and virtual CPUs for a guest.
    ///
    /// # Errors
    /// When that is more than is left.
    pub(crate) fn guest(self: &Arc<Self>, memory: u64, cpus: u32) -> Result<Guest, Failure> {
        let mut guests = self.guests();
        let left = self.limits.memory.saturating_sub(guests.memory);
        if memory > left {
            let (asked, most) = (memory.div_ceil(1 << 20), self.limits.memory >> 20);
            let message = if memory > self.limits.memory {
                format!(
                    "the machine is to have {asked} MiB of memory, and all machines together may have \
                     {most} MiB: ask for less"
                )
            } else {
                format!(
                    "the machine is to have {asked} MiB of memory, and {} MiB are left of the {most} MiB \
                     that all machines may have: stop one, or ask for less",
                    left >> 20
                )
            };
            let kind = ErrorKind::TooMuchMemory;
            return Err(Failure::new(Code::ResourceExhausted, kind, message)
                .bound("memory", self.limits.memory, left)
                .on("memory"));
        }
        let left = self.limits.cpus.saturating_sub(guests.cpus);
        if cpus > left {
            let message = format!(
                "the machine is to have {cpus} virtual CPUs, and {left} are left of the {} that all \
                 machines may have: stop one, or ask for fewer",
                self.limits.cpus,
            );
            let kind = ErrorKind::TooManyCpus;
            return Err(Failure::new(Code::ResourceExhausted, kind, message)
                .bound("cpus", self.limits.cpus, left)
                .on("cpus"));
        }
        // Neither is more than its limit, as was just seen.
        guests.memory = guests.memory.saturating_add(memory);
        guests.cpus = guests.cpus.saturating_add(cpus);
        Ok(Guest {
            totals: Arc::clone(self),
            memory,
            cpus,
        })
    }

    fn guests(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one guest has of the totals, until it goes.
#[derive(Debug)]
pub(crate) struct Guest {
    totals: Arc<Totals>,
    memory: u64,
    cpus: u32,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut guests = self.totals.guests();
        guests.memory = guests.memory.saturating_sub(self.memory);
        guests.cpus = guests.cpus.saturating_sub(self.cpus);
    }
}

/// Places of one kind for clients.
#[derive(Debug)]
pub(crate) struct Places {
    free: Arc<Semaphore>,
    most: usize,
    kind: ErrorKind,
    what: &'static str,
    limit: &'static str,
}

impl Places {
    fn new(most: usize, kind: ErrorKind, what: &'static str, limit: &'static str) -> Self {
        let most = most.min(Semaphore::MAX_PERMITS);
        Self {
            free: Arc::new(Semaphore::new(most)),
            most,
            kind,
            what,
            limit,
        }
    }

    /// One of them, until it goes.
    ///
    /// # Errors
    /// When all are taken.
    pub(crate) fn take(&self) -> Result<OwnedSemaphorePermit, Failure> {
        let place = Arc::clone(&self.free).try_acquire_owned();
        place.map_err(|_| self.exhausted())
    }

    /// One of them, as soon as there is one; never, if they are taken for ever.
    pub(crate) async fn wait(&self) -> OwnedSemaphorePermit {
        match Arc::clone(&self.free).acquire_owned().await {
            Ok(place) => place,
            // It is closed by nobody.
            Err(_) => std::future::pending().await,
        }
    }

    /// That all are taken.
    pub(crate) fn exhausted(&self) -> Failure {
        let Self {
            most, what, limit, ..
        } = self;
        let message = format!(
            "all {most} {what} this server are taken: end one first, or raise `{limit}` in its \
             configuration"
        );
        Failure::new(Code::ResourceExhausted, self.kind, message).bound(limit, *most, 0)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;
    use crate::status::tests::{detail, info};

    const GIB: u64 = 1 << 30;

    fn totals() -> Arc<Totals> {
        Arc::new(Totals::new(Limits {
            memory: 4 * GIB,
            cpus: 6,
            streams: 2,
            ..Limits::of_host()
        }))
    }

    #[test]
    fn guests_have_no_more_than_all_may_and_give_it_back() {
        let totals = totals();
        let ask = |memory, cpus| totals.guest(memory, cpus).map_err(Status::from);
        let first = ask(3 * GIB, 1).unwrap();
        let error = ask(2 * GIB, 1).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert_eq!(detail(&error).kind(), ErrorKind::TooMuchMemory);
        let told = "2048 MiB of memory, and 1024 MiB are left of the 4096 MiB";
        assert!(error.message().contains(told), "{}", error.message());
        assert_eq!(info(&error).metadata["left"], GIB.to_string());

        let second = ask(GIB, 5).unwrap();
        let error = ask(0, 1).unwrap_err();
        assert_eq!(detail(&error).kind(), ErrorKind::TooManyCpus);
        assert!(error.message().contains("and 0 are left of the 6"));
        // What is refused takes nothing.
        drop(first);
        let third = ask(3 * GIB, 1).unwrap();
        drop((second, third));
        assert!(ask(4 * GIB, 6).is_ok());
        assert!(ask(u64::MAX, 1).is_err() && ask(1, u32::MAX).is_err());
    }

    #[test]
    fn places_are_as_many_as_there_are() {
        let totals = totals();
        let (one, _other) = (
            totals.streams.take().unwrap(),
            totals.streams.take().unwrap(),
        );
        let error = Status::from(totals.streams.take().unwrap_err());
        assert_eq!(detail(&error).kind(), ErrorKind::TooManyStreams);
        assert!(error.message().contains("all 2 streams"), "{error}");
        drop(one);
        assert!(totals.streams.take().is_ok());
    }
}
