//! Keeps the sessions of a server: probes and pauses that are requested in a session belong to it, and are
//! cleaned up when it ends.
//!
//! A [`Book`] makes the decisions; this module adds the lock around it, the machines, and the time. The lock is
//! never held while a machine is called, except for questions that a machine answers at once. Invariants: each
//! machine has one clean-up at a time, even if many sessions end; a clean-up that fails is logged, and tried again
//! for as long as the machine exists.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hvprobe_machine::{LetGo, Owner};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{self, ErrorKind, SessionEnd, SessionState};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tonic::{Code, Status};

use super::book::{Book, Gone, Stage, Unopened};
use super::owners::{Named, Owners};
use crate::status::stopping;
use crate::uuid;
use crate::wire::anchor;

/// Delay before a failed clean-up is tried again for the first time.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum delay before a failed clean-up is tried again.
const LONGEST: Duration = Duration::from_secs(30);

/// A machine, as sessions see it. Clones refer to the same machine.
pub(crate) trait Place: Clone + Send + Sync + 'static {
    /// Returns the number of the machine, which no other machine has.
    fn number(&self) -> u64;
    /// Returns the name of the machine.
    fn name(&self) -> &str;
    /// Whether the machine has not ended.
    fn is_there(&self) -> bool;
    /// Whether anything on the machine belongs to `owner`; answers at once.
    fn has(&self, owner: Owner) -> bool;
    /// Unregisters the probes and ends the pauses of `owners`. On a machine that has ended there is nothing to
    /// clean up.
    fn let_go(&self, owners: Vec<Owner>) -> impl Future<Output = Result<LetGo, Status>> + Send;
}

/// A client's request for a session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked {
    /// Owner, as the client states it.
    pub(crate) owner: String,
    /// How long the session outlives the last message of its client.
    pub(crate) ttl: Duration,
    pub(crate) keep: bool,
    pub(crate) take_over: Vec<String>,
}

#[derive(Debug)]
struct About {
    owner: String,
    ttl: Duration,
    open_ns: u64,
    /// Reports the end of the session to its holder, and to the session's streams of decisions.
    over: watch::Sender<Option<SessionEnd>>,
}

#[derive(Debug)]
struct State<P> {
    book: Book<About>,
    /// Machines on which sessions may own something.
    places: BTreeMap<u64, P>,
    /// For each session that is ending: the sender that reports its end, and what has been cleaned up so far.
    waiting: BTreeMap<String, (oneshot::Sender<Vec<v1::LetGo>>, Vec<v1::LetGo>)>,
    closed: bool,
}

/// The sessions of a server. Clones share them.
#[derive(Debug)]
pub(crate) struct Sessions<P> {
    state: Arc<Mutex<State<P>>>,
    most: usize,
    owners: Owners,
    /// Runtime for clean-ups: a session may end on any thread, also outside of a runtime.
    runtime: Handle,
}

impl<P> Clone for Sessions<P> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            most: self.most,
            owners: self.owners.clone(),
            runtime: self.runtime.clone(),
        }
    }
}

/// A session that is open until this is dropped.
#[derive(Debug)]
pub(crate) struct Open<P: Place> {
    sessions: Sessions<P>,
    id: String,
    /// Reports an end of the session that its own client has not caused.
    pub(crate) over: watch::Receiver<Option<SessionEnd>>,
}

/// A request that is carried out in the name of a session, until this is dropped.
#[derive(Debug)]
pub(crate) struct Ticket<P: Place> {
    sessions: Sessions<P>,
    number: u64,
    /// Owner of what the request creates.
    pub(crate) owner: Owner,
}

impl<P: Place> Sessions<P> {
    /// Creates an empty keeper for at most `most` sessions. It enters the owner numbers of all sessions into
    /// `owners`, and runs clean-ups on `runtime`.
    pub(crate) fn new(most: usize, owners: Owners, runtime: Handle) -> Self {
        let state = State {
            book: Book::new(most),
            places: BTreeMap::new(),
            waiting: BTreeMap::new(),
            closed: false,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            most,
            owners,
            runtime,
        }
    }

    fn state(&self) -> MutexGuard<'_, State<P>> {
        // Every step leaves the state consistent, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session.
    pub(crate) fn open(&self, asked: Asked) -> Result<(Open<P>, v1::Session), Status> {
        let id = uuid::random().map_err(|error| {
            Status::internal(format!("the host gives no random number: {error}"))
        })?;
        let (over, is_over) = watch::channel(None);
        let about = About {
            owner: asked.owner,
            ttl: asked.ttl,
            open_ns: anchor::now().monotonic_ns,
            over,
        };
        let named = Named {
            owner: about.owner.as_str().into(),
            session: id.as_str().into(),
        };
        let mut state = self.state();
        if state.closed {
            return Err(stopping());
        }
        self.sweep(&mut state);
        let State { book, places, .. } = &mut *state;
        let taken: Vec<_> = asked
            .take_over
            .iter()
            .filter_map(|id| book.get(id))
            .collect();
        let mut before: BTreeSet<_> = taken.iter().flat_map(|it| &it.owners).copied().collect();
        let taken: Vec<_> = taken.iter().map(|it| it.about.over.clone()).collect();
        let has = |machine, owner| places.get(&machine).is_some_and(|it| it.has(owner));
        let opened = book.open(&id, about, asked.keep, &asked.take_over, has);
        let owners = opened.map_err(|why| unopened(why, self.most, &asked.take_over))?;
        before.retain(|owner| !owners.contains(owner));
        self.owners.forget(before);
        self.owners.name(owners, &named);
        for over in taken {
            over.send_replace(Some(SessionEnd::TakenOver));
        }
        let session = state.describe(&id).unwrap_or_default();
        drop(state);
        let open = Open {
            sessions: self.clone(),
            id,
            over: is_over,
        };
        Ok((open, session))
    }

    /// Begins a request on `place` in the name of the session `id`; `None` if `id` is empty.
    pub(crate) fn begin(&self, id: &str, place: &P) -> Result<Option<Ticket<P>>, Status> {
        if id.is_empty() {
            return Ok(None);
        }
        let mut state = self.state();
        self.sweep(&mut state);
        let begun = state.book.begin(id, place.number());
        let (number, owner) = begun.ok_or_else(no_such_session)?;
        state.places.insert(place.number(), place.clone());
        drop(state);
        Ok(Some(Ticket {
            sessions: self.clone(),
            number,
            owner,
        }))
    }

    /// Follows the end of the session `id`; `None` if `id` is empty. If what the session owns is kept, its end is
    /// not reported until another session takes it over.
    pub(crate) fn follow(
        &self,
        id: &str,
    ) -> Result<Option<watch::Receiver<Option<SessionEnd>>>, Status> {
        if id.is_empty() {
            return Ok(None);
        }
        let state = self.state();
        let session = state.book.get(id).filter(|it| it.stage == Stage::Held);
        let session = session.ok_or_else(no_such_session)?;
        Ok(Some(session.about.over.subscribe()))
    }

    /// Returns all sessions in the order in which they were opened, each with its number in that order.
    pub(crate) fn all(&self) -> Vec<(u64, v1::Session)> {
        let mut state = self.state();
        self.sweep(&mut state);
        let all = state.book.all().into_iter();
        all.filter_map(|(id, session)| Some((session.own.0, state.describe(id)?)))
            .collect()
    }

    /// Ends all held sessions, and refuses new ones.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        for (_, session) in state.book.all() {
            if session.stage == Stage::Held {
                let why = Some(SessionEnd::ServerStopping);
                session.about.over.send_replace(why);
            }
        }
    }

    /// Ends the session `id`, whose client is gone. The receiver gets what was cleaned up, once the clean-up is
    /// complete. It is closed at once if the session had ended already, or is kept.
    fn end(&self, id: &str, why: SessionEnd) -> oneshot::Receiver<Vec<v1::LetGo>> {
        let (done, is_done) = oneshot::channel();
        let mut state = self.state();
        match state.book.end(id) {
            Some(Stage::Ending) => {
                if let Some(session) = state.book.get(id) {
                    session.about.over.send_replace(Some(why));
                }
                state.waiting.insert(id.to_owned(), (done, Vec::new()));
            }
            // Dropping `done` reports that nothing is cleaned up.
            Some(Stage::Kept | Stage::Held) | None => {}
        }
        drop(state);
        self.see_to();
        is_done
    }

    /// Starts the clean-ups that are due.
    fn see_to(&self) {
        let mut state = self.state();
        self.sweep(&mut state);
        let due = state.book.due();
        for (machine, owners) in due {
            if let Some(place) = state.places.get(&machine).cloned() {
                self.runtime.spawn(self.clone().release(place, owners));
            }
        }
    }

    /// Cleans up `place` for `owners`. Tries again until an attempt succeeds.
    async fn release(self, place: P, mut owners: Vec<Owner>) {
        let mut patience = PATIENCE;
        let let_go = loop {
            match place.let_go(owners.clone()).await {
                Ok(let_go) => break let_go,
                Err(error) => {
                    let machine = place.name();
                    tracing::error!(machine, %error, "what ended sessions have cannot be let go of");
                }
            }
            tokio::time::sleep(patience).await;
            patience = LONGEST.min(patience * 2);
            // Sessions that have ended meanwhile are included.
            owners = self.state().book.due_on(place.number());
        };
        let mut state = self.state();
        for Gone { id, owners } in state.book.released(place.number(), &owners) {
            let probes = let_go.probes.iter().filter(|(of, _)| owners.contains(of));
            let probes: usize = probes.map(|(_, count)| *count).sum();
            let report = v1::LetGo {
                machine: place.name().to_owned(),
                // There are far fewer probes than a `u32` can count.
                probes: u32::try_from(probes).unwrap_or(u32::MAX),
                resumed: let_go.resumed,
            };
            if let Some((_, all)) = state.waiting.get_mut(&id)
                && (probes > 0 || report.resumed)
            {
                all.push(report);
            }
        }
        drop(state);
        self.see_to();
    }

    /// Removes machines and sessions that no longer exist. Reports to the waiting holder of each such session what
    /// was cleaned up.
    fn sweep(&self, state: &mut State<P>) {
        let State {
            book,
            places,
            waiting,
            ..
        } = state;
        let is_there = |machine| places.get(&machine).is_some_and(P::is_there);
        let has = |machine, owner| places.get(&machine).is_some_and(|it| it.has(owner));
        for Gone { id, owners } in book.sweep(is_there, has) {
            self.owners.forget(owners);
            if let Some((done, all)) = waiting.remove(&id) {
                // The receiver may be gone.
                let _gone = done.send(all);
            }
        }
        places.retain(|machine, _| book.knows(*machine));
    }
}

impl<P> State<P> {
    fn describe(&self, id: &str) -> Option<v1::Session> {
        let session = self.book.get(id)?;
        let state = match session.stage {
            Stage::Held => SessionState::Held,
            Stage::Kept => SessionState::Kept,
            Stage::Ending => SessionState::Ending,
        };
        Some(v1::Session {
            id: id.to_owned(),
            owner: session.about.owner.clone(),
            state: state.into(),
            ttl_ms: u32::try_from(session.about.ttl.as_millis()).unwrap_or(u32::MAX),
            keep: session.keep,
            open_ns: session.about.open_ns,
        })
    }
}

impl<P: Place> Open<P> {
    /// Ends the session, and waits until everything that it owned is cleaned up.
    pub(crate) async fn end(self, why: SessionEnd) -> Vec<v1::LetGo> {
        let done = self.sessions.end(&self.id, why);
        done.await.unwrap_or_default()
    }
}

impl<P: Place> Drop for Open<P> {
    fn drop(&mut self) {
        // Does nothing if the session has ended.
        let _nobody_waits = self.sessions.end(&self.id, SessionEnd::Disconnected);
    }
}

impl<P: Place> Drop for Ticket<P> {
    fn drop(&mut self) {
        self.sessions.state().book.finish(self.number);
        self.sessions.see_to();
    }
}

/// Waits until the end of the session that `over` follows is reported, and returns the reason.
pub(crate) async fn ended(over: &mut watch::Receiver<Option<SessionEnd>>) -> SessionEnd {
    match over.wait_for(Option::is_some).await.map(|why| *why) {
        Ok(Some(why)) => why,
        // The session is gone without a reason, because what it owned is kept.
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

fn no_such_session() -> Status {
    let message = "there is no such session, or it has ended";
    Failure::new(Code::NotFound, ErrorKind::NoSuchSession, message).into()
}

fn unopened(why: Unopened, most: usize, take_over: &[String]) -> Status {
    match why {
        Unopened::TooMany => {
            let message = format!(
                "all {most} sessions of this server are taken: end one first, or raise `sessions` in its \
                 configuration"
            );
            Failure::new(Code::ResourceExhausted, ErrorKind::TooManySessions, message)
                .bound("sessions", most, 0)
                .into()
        }
        Unopened::NoSuch(index) => {
            let id = take_over.get(index).map(String::as_str).unwrap_or_default();
            let message = format!("there is no session {id:?} to take over");
            Failure::new(Code::NotFound, ErrorKind::NoSuchSession, message)
                .at_index(index)
                .into()
        }
    }
}
