//! Which sessions there are, and what has to be let go of: decided, without clocks, machines or waiting.
//!
//! ```text
//!             end                    nothing under way on a machine: it is due ──► let go, everywhere
//!   held ─────────────► ending ────────────────────────────────────────────────────────► (gone)
//!    │ │ end, and keep                  it has nothing any more
//!    │ └──────────────► kept ──────────────────────────────────────────────────────────► (gone)
//!    │ taken over        │ taken over
//!    └───────────────────┴──► (gone: what it had is another's)
//! ```
//! Machines know whose things are by [`Owner`] alone. A session has a number of its own, and those of the
//! sessions that it took over, so that taking over changes nothing in a machine, and whatever is under way
//! for one arrives at the other.
//!
//! Invariants, whatever the order of calls:
//! - nothing begins for a session that is not held, and what has begun is over before its machine is due:
//!   when a session that is not kept is gone, nothing of it is left anywhere;
//! - nothing is due that belongs to a session that is held or kept;
//! - of one machine, one thing at a time is being let go.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_machine::Owner;

/// What becomes of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its client is there.
    Held,
    /// It has ended, and what it has stays.
    Kept,
    /// It has ended, and what it has is being let go of.
    Ending,
}

/// A session.
#[derive(Debug)]
pub(crate) struct Session<A> {
    /// What its client said, and whatever else is told of it.
    pub(crate) about: A,
    pub(crate) stage: Stage,
    pub(crate) keep: bool,
    /// Of what it asks for now; also tells which session was opened first.
    pub(crate) own: Owner,
    pub(crate) owners: BTreeSet<Owner>,
    /// Where it may have something.
    machines: BTreeSet<u64>,
}

/// Why a session was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unopened {
    /// There are as many as may be.
    TooMany,
    /// The one at this position of those to be taken over is not there, or is ending.
    NoSuch(usize),
}

/// A session that is not there any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gone {
    pub(crate) id: String,
    pub(crate) owners: BTreeSet<Owner>,
}

/// What a client has asked for and is not done.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    owner: Owner,
    machine: u64,
}

/// All sessions of a server; `A` is what else is known of each.
#[derive(Debug)]
pub(crate) struct Book<A> {
    /// How many there may be.
    most: usize,
    sessions: BTreeMap<String, Session<A>>,
    next_owner: u64,
    next_ticket: u64,
    under_way: BTreeMap<u64, UnderWay>,
    /// Machines that are letting go of something.
    busy: BTreeSet<u64>,
}

impl<A> Book<A> {
    /// None yet, of so many that there may be.
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

    /// Opens the session `id`, which takes over those that `take_over` names; `has` says whether a machine
    /// has something of an owner. Returns all that stands for the session from now on.
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
        // A client that comes back again and again is not to become longer each time.
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

    /// The session `id`.
    pub(crate) fn get(&self, id: &str) -> Option<&Session<A>> {
        self.sessions.get(id)
    }

    /// All sessions, in the order they were opened.
    pub(crate) fn all(&self) -> Vec<(&String, &Session<A>)> {
        let mut all: Vec<_> = self.sessions.iter().collect();
        all.sort_unstable_by_key(|(_, session)| session.own);
        all
    }

    /// Something is asked of `machine` for the session `id`, unless it is not held; for whom, and the
    /// ticket to [finish](Book::finish) it with.
    pub(crate) fn begin(&mut self, id: &str, machine: u64) -> Option<(u64, Owner)> {
        let held = |session: &&mut Session<A>| session.stage == Stage::Held;
        let session = self.sessions.get_mut(id).filter(held)?;
        session.machines.insert(machine);
        let (ticket, owner) = (self.next_ticket, session.own);
        self.next_ticket += 1;
        self.under_way.insert(ticket, UnderWay { owner, machine });
        Some((ticket, owner))
    }

    /// What was begun is done, or has failed.
    pub(crate) fn finish(&mut self, ticket: u64) {
        self.under_way.remove(&ticket);
    }

    /// The client of the session `id` is gone; what becomes of the session, if it was held.
    pub(crate) fn end(&mut self, id: &str) -> Option<Stage> {
        let held = |session: &&mut Session<A>| session.stage == Stage::Held;
        let session = self.sessions.get_mut(id).filter(held)?;
        session.stage = match session.keep {
            true => Stage::Kept,
            false => Stage::Ending,
        };
        Some(session.stage)
    }

    /// The machines that have to let go of something now, each with the owners of it. Each is told once,
    /// until it has [let go](Book::released).
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

    /// Those of whom `machine` has to let go now.
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

    /// `machine` has let go of `owners`; the sessions that have nothing there any more, each with what
    /// stands for it.
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

    /// Forgets the machines that are not there any more, and the sessions that have nothing and are not
    /// held, and returns those. `has` says whether a machine has something of an owner.
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

    /// Whether a session may have something on `machine`.
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
