//! Resources that the machines and clients of a server use.
//!
//! Invariant: use never exceeds the [limits](Limits). A permit is taken before the resource is used, and is
//! released on drop.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hvprobe_machine::queue::Pool;
use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Code;

use super::server_limits::Limits;

/// The lists and filters of subscriptions may take one part in this many of the bytes for events.
const LISTS: usize = 4;

/// Use of a server's resources.
#[derive(Debug)]
pub(crate) struct Totals {
    limits: Limits,
    guests: Mutex<Guests>,
    pub(crate) connections: Places,
    pub(crate) tcp_connections: Places,
    pub(crate) streams: Places,
    pub(crate) subscribers: Places,
    /// Bytes for events that wait for clients.
    pub(crate) events: Pool,
    /// The part of `events` that lists and filters of subscriptions may take. The limit keeps the lists of a few
    /// clients from crowding out the events of all others.
    pub(crate) lists: Pool,
    /// Large requests under way.
    pub(crate) large_requests: Places,
    /// Calls with long answers under way, except for one of each connection.
    pub(crate) large_answers: Places,
}

/// Resources of the guests.
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
            large_requests: Places::new(
                limits.large_requests,
                ErrorKind::NoRoom,
                "large requests to",
                "large_requests",
            ),
            large_answers: Places::new(
                limits.large_answers,
                ErrorKind::NoRoom,
                "long answers of",
                "large_answers",
            ),
            limits,
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes memory and vCPUs for a guest.
    ///
    /// # Errors
    /// When less is left.
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
        // Both sums are within the limits, which were just checked.
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

/// Memory and vCPUs of one guest; released on drop.
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

/// Permits of one kind for clients.
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

    /// Takes a permit, which is released on drop.
    ///
    /// # Errors
    /// When all are taken.
    pub(crate) fn take(&self) -> Result<OwnedSemaphorePermit, Failure> {
        let place = Arc::clone(&self.free).try_acquire_owned();
        place.map_err(|_| self.exhausted())
    }

    /// Waits for a permit.
    pub(crate) async fn wait(&self) -> OwnedSemaphorePermit {
        match Arc::clone(&self.free).acquire_owned().await {
            Ok(place) => place,
            // Nothing closes the semaphore.
            Err(_) => std::future::pending().await,
        }
    }

    /// Returns the number of free permits.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.free.available_permits()
    }

    /// Returns the error for a client that gets no permit.
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
        let expected = "2048 MiB of memory, and 1024 MiB are left of the 4096 MiB";
        assert!(error.message().contains(expected), "{}", error.message());
        assert_eq!(info(&error).metadata["left"], GIB.to_string());

        let second = ask(GIB, 5).unwrap();
        let error = ask(0, 1).unwrap_err();
        assert_eq!(detail(&error).kind(), ErrorKind::TooManyCpus);
        assert!(error.message().contains("and 0 are left of the 6"));
        // A refused guest takes nothing.
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
