//! Bookkeeping of sessions: which exist, and what has to be cleaned up. Needs no clocks, no machines and no
//! waiting.
//!
//! ```text
//!             end                    nothing under way on a machine: it is due ──► let go, everywhere
//!   held ─────────────► ending ────────────────────────────────────────────────────────► (gone)
//!    │ │ end, and keep                  it has nothing any more
//!    │ └──────────────► kept ──────────────────────────────────────────────────────────► (gone)
//!    │ taken over        │ taken over
//!    └───────────────────┴──► (gone: what it had is another's)
//! ```
//! Machines identify owners by [`Owner`] alone. A session has an owner number of its own, and those of the sessions
//! that it took over. So a take-over changes nothing in a machine. Probes and pauses that requests under way still
//! create for the old session belong to the new one.
//!
//! Invariants, for every order of calls:
//! - no request begins for a session that is not held, and the clean-up of a machine waits for the requests
//!   that have begun there: when a session that is not kept is gone, nothing of it is left anywhere;
//! - no clean-up is due for a session that is held or kept;
//! - each machine has one clean-up at a time.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_machine::Owner;

/// State of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its client holds it.
    Held,
    /// It has ended, and its probes and pauses stay.
    Kept,
    /// It has ended and is being cleaned up.
    Ending,
}

/// A session.
#[derive(Debug)]
pub(crate) struct Session<A> {
    /// The caller's data about the session.
    pub(crate) about: A,
    pub(crate) stage: Stage,
    pub(crate) keep: bool,
    /// Owner of the probes and pauses that the session creates. These numbers are in the order in which sessions
    /// were opened.
    pub(crate) own: Owner,
    pub(crate) owners: BTreeSet<Owner>,
    /// Machines on which it may own something.
    machines: BTreeSet<u64>,
}

/// Why a session was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unopened {
    /// The maximum number of sessions exists.
    TooMany,
    /// The session at this index of those to be taken over does not exist, or is ending.
    NoSuch(usize),
}

/// A session that no longer exists.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gone {
    pub(crate) id: String,
    pub(crate) owners: BTreeSet<Owner>,
}

/// A client's request that is not done yet.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    owner: Owner,
    machine: u64,
}

/// All sessions of a server; `A` is the caller's data about each.
#[derive(Debug)]
pub(crate) struct Book<A> {
    /// Maximum number of sessions.
    most: usize,
    sessions: BTreeMap<String, Session<A>>,
    next_owner: u64,
    next_ticket: u64,
    under_way: BTreeMap<u64, UnderWay>,
    /// Machines that are being cleaned up.
    busy: BTreeSet<u64>,
}

impl<A> Book<A> {
    /// Creates an empty book for at most `most` sessions.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            most,
            sessions: BTreeMap::new(),
            next_owner: 0,
            next_ticket: 0,
            under_way: BTreeMap::new(),
            busy: BTreeSet::new(),
        }
    }

    /// Opens the session `id`, which takes over the sessions that `take_over` names. `has` returns whether a
    /// machine has something of an owner. Returns all owners of the session.
    pub(crate) fn open(
        &mut self,
        id: &str,
        about: A,
        keep: bool,
        take_over: &[String],
        has: impl Fn(u64, Owner) -> bool,
    ) -> Result<BTreeSet<Owner>, Unopened> {
        let gone = |other: &String| {
            let other = self.sessions.get(other);
            other.is_none_or(|other| other.stage == Stage::Ending)
        };
        if let Some(index) = take_over.iter().position(gone) {
            return Err(Unopened::NoSuch(index));
        }
        let taken: BTreeSet<&String> = take_over.iter().collect();
        if self.sessions.len() - taken.len() >= self.most {
            return Err(Unopened::TooMany);
        }
        let own = Owner(self.next_owner);
        self.next_owner += 1;
        let (mut owners, mut machines) = (BTreeSet::new(), BTreeSet::new());
        for other in taken {
            if let Some(other) = self.sessions.remove(other) {
                owners.extend(other.owners);
                machines.extend(other.machines);
            }
        }
        // Owners that have nothing are dropped, so that a session does not grow each time its client
        // reconnects.
        let here = |owner| {
            let mut under_way = self.under_way.values();
            machines.iter().any(|machine| has(*machine, owner))
                || under_way.any(|it| it.owner == owner)
        };
        owners.retain(|owner| here(*owner));
        owners.insert(own);
        let all = owners.clone();
        let session = Session {
            about,
            stage: Stage::Held,
            keep,
            own,
            owners,
            machines,
        };
        self.sessions.insert(id.to_owned(), session);
        Ok(all)
    }

    /// Returns the session `id`.
    pub(crate) fn get(&self, id: &str) -> Option<&Session<A>> {
        self.sessions.get(id)
    }

    /// Returns all sessions, in the order in which they were opened.
    pub(crate) fn all(&self) -> Vec<(&String, &Session<A>)> {
        let mut all: Vec<_> = self.sessions.iter().collect();
        all.sort_unstable_by_key(|(_, session)| session.own);
        all
    }

    /// Begins a request on `machine` for the session `id`, if the session is held. Returns the ticket for
    /// [`Book::finish`], and the owner of what the request creates.
    pub(crate) fn begin(&mut self, id: &str, machine: u64) -> Option<(u64, Owner)> {
        let held = |session: &&mut Session<A>| session.stage == Stage::Held;
        let session = self.sessions.get_mut(id).filter(held)?;
        session.machines.insert(machine);
        let (ticket, owner) = (self.next_ticket, session.own);
        self.next_ticket += 1;
        self.under_way.insert(ticket, UnderWay { owner, machine });
        Some((ticket, owner))
    }

    /// Ends a request, which is done or has failed.
    pub(crate) fn finish(&mut self, ticket: u64) {
        self.under_way.remove(&ticket);
    }

    /// Ends the session `id`, whose client is gone. Returns the new state, if the session was held.
    pub(crate) fn end(&mut self, id: &str) -> Option<Stage> {
        let held = |session: &&mut Session<A>| session.stage == Stage::Held;
        let session = self.sessions.get_mut(id).filter(held)?;
        session.stage = match session.keep {
            true => Stage::Kept,
            false => Stage::Ending,
        };
        Some(session.stage)
    }

    /// Returns the machines that have to be cleaned up now, each with the owners to clean up for. Does not return a
    /// machine again before it [has been cleaned up](Book::released).
    pub(crate) fn due(&mut self) -> Vec<(u64, Vec<Owner>)> {
        let ending = self
            .sessions
            .values()
            .filter(|it| it.stage == Stage::Ending);
        let machines: BTreeSet<u64> = ending.flat_map(|it| &it.machines).copied().collect();
        let mut due = Vec::new();
        for machine in machines {
            let owners = self.due_on(machine);
            if !owners.is_empty() && self.busy.insert(machine) {
                due.push((machine, owners));
            }
        }
        due
    }

    /// Returns the owners for which `machine` has to be cleaned up now.
    pub(crate) fn due_on(&self, machine: u64) -> Vec<Owner> {
        let due = |session: &&Session<A>| {
            session.stage == Stage::Ending
                && session.machines.contains(&machine)
                && !self.is_under_way(session, |on| on == machine)
        };
        let due = self.sessions.values().filter(due);
        due.flat_map(|session| session.owners.iter().copied())
            .collect()
    }

    /// Notes that `machine` has been cleaned up for `owners`. Returns the sessions that own nothing there any
    /// more, each with its owners.
    pub(crate) fn released(&mut self, machine: u64, owners: &[Owner]) -> Vec<Gone> {
        self.busy.remove(&machine);
        let mut settled = Vec::new();
        for (id, session) in &mut self.sessions {
            let is_ending = session.stage == Stage::Ending;
            let all = || session.owners.iter().all(|owner| owners.contains(owner));
            if is_ending && all() && session.machines.remove(&machine) {
                settled.push(Gone {
                    id: id.clone(),
                    owners: session.owners.clone(),
                });
            }
        }
        settled
    }

    /// Removes the machines that no longer exist, and the sessions that own nothing and are not held. Returns
    /// those sessions. `has` returns whether a machine has something of an owner.
    pub(crate) fn sweep(
        &mut self,
        is_there: impl Fn(u64) -> bool,
        has: impl Fn(u64, Owner) -> bool,
    ) -> Vec<Gone> {
        let mut gone = Vec::new();
        let on: BTreeSet<u64> = self.under_way.values().map(|it| it.machine).collect();
        for (id, session) in &mut self.sessions {
            let busy = |machine: &u64| self.busy.contains(machine) || on.contains(machine);
            let owners = &session.owners;
            let kept = session.stage == Stage::Kept;
            session.machines.retain(|machine| {
                let has = || owners.iter().any(|owner| has(*machine, *owner));
                busy(machine) || (is_there(*machine) && (!kept || has()))
            });
            if session.stage != Stage::Held && session.machines.is_empty() {
                gone.push(Gone {
                    id: id.clone(),
                    owners: session.owners.clone(),
                });
            }
        }
        for gone in &gone {
            self.sessions.remove(&gone.id);
        }
        gone
    }

    /// Whether any session may own something on `machine`.
    pub(crate) fn knows(&self, machine: u64) -> bool {
        let mut sessions = self.sessions.values();
        sessions.any(|session| session.machines.contains(&machine))
    }

    fn is_under_way(&self, session: &Session<A>, on: impl Fn(u64) -> bool) -> bool {
        let mut under_way = self.under_way.values();
        under_way.any(|it| on(it.machine) && session.owners.contains(&it.owner))
    }
}

#[cfg(test)]
mod tests;
