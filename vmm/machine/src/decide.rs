//! Questions that virtual CPUs put to clients at hits, and the answers.
//!
//! ```text
//!          ask                     answer, in time
//!   hit ────────► open ─────────────────────────────► decided
//!    │             │ the deadline passes, the client
//!    │ nobody      │ goes, or the machine ends
//!    └─────────────┴─────────────────────────────────► unanswered: the probe's default
//! ```
//! A question is put to one client, which has until its deadline. The virtual CPU that asks waits
//! in its own thread; when the machine wants its attention meanwhile it parks and then waits on: the
//! question stays open, and the deadline stays where it is.
//!
//! A client that misses [`MISSES`] deadlines one after another is asked no more: it is frozen, or gone
//! without a word, and each question to it costs the guest a deadline. Questions that were open at the
//! same time are one miss.
//!
//! Invariants: a virtual CPU has at most one question open; each question gets one verdict; nobody
//! waits for a client that has gone. The lock is taken alone, never while waiting, and not at all
//! by hits that ask nothing.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Event;
use hvprobe_spec::{Decision, ProbeId, SpecError};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Names one question of a machine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// A virtual CPU waits at a hit for what a client decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// To be given back with the answer.
    pub token: Token,
    /// The hit.
    pub event: Event,
    /// When it falls to the probe's default: nanoseconds of the host's `CLOCK_MONOTONIC`.
    pub deadline_ns: u64,
}

/// Why an answer has no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// There is no such question, or not any more, or it was put to another client.
    #[error("question {} is not open: its deadline has passed, or it was not put to this client", .0.0)]
    TooLate(Token),
    /// The decision exceeds a limit. The question stays open.
    #[error("the decision cannot be carried out")]
    Invalid(#[from] SpecError),
}

/// What became of the questions of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecisionCounts {
    /// Answered in time.
    pub answered: u64,
    /// The deadline passed.
    pub expired: u64,
    /// There was no client to put it to, or it went.
    pub unattended: u64,
}

/// What a virtual CPU got to its question.
#[derive(Debug)]
pub(crate) enum Reply<'a> {
    /// A client decided.
    Decided(Decision),
    /// The probe's default is to be carried out.
    Unanswered,
    /// The machine wants attention: park, and then wait on.
    Interrupted(Asked<'a>),
}

/// Brings questions to clients and answers back.
#[derive(Debug, Default)]
pub struct Decisions(Arc<Mutex<State>>);

/// Deadlines that a client may miss, one after another, before it is dropped.
pub const MISSES: u32 = 3;

/// How many questions wait for one client to take them. Each virtual CPU has one open; what is more
/// than that has lost its deadline already.
const QUEUE: usize = 256;

#[derive(Debug, Default)]
struct State {
    closed: bool,
    /// The one to be asked next comes first.
    clients: Vec<Client>,
    /// At most one of each virtual CPU.
    open: Vec<Open>,
    tokens: u64,
    names: u64,
    counts: DecisionCounts,
}

#[derive(Debug)]
struct Client {
    name: u64,
    probes: HashSet<ProbeId>,
    queue: Sender<Question>,
    /// Deadlines it has missed since it answered.
    missed: u32,
    /// The first question that is not of the time of the last one it missed.
    next_miss: u64,
}

#[derive(Debug)]
struct Open {
    token: Token,
    /// Name of the client it was put to.
    client: u64,
    deadline: Instant,
    thread: Thread,
    verdict: Option<Verdict>,
}

#[derive(Debug)]
enum Verdict {
    Decided(Decision),
    Unanswered,
}

impl Open {
    /// Gives the waiting virtual CPU its verdict. It has none yet.
    fn settle(&mut self, verdict: Verdict) {
        self.verdict = Some(verdict);
        self.thread.unpark();
    }
}

impl State {
    fn answer(&mut self, client: u64, token: Token, decision: Decision) -> Result<(), AnswerError> {
        let now = Instant::now();
        let asked = |open: &&mut Open| {
            open.token == token
                && open.client == client
                && open.verdict.is_none()
                && now < open.deadline
        };
        let open = self.open.iter_mut().find(asked);
        let open = open.ok_or(AnswerError::TooLate(token))?;
        open.settle(Verdict::Decided(decision));
        self.counts.answered += 1;
        let mut clients = self.clients.iter_mut();
        if let Some(client) = clients.find(|it| it.name == client) {
            client.missed = 0;
        }
        Ok(())
    }

    /// The client called `name` has let the deadline of the question `token` pass.
    fn missed(&mut self, name: u64, token: Token) {
        let Some(at) = self.clients.iter().position(|client| client.name == name) else {
            return;
        };
        let client = &mut self.clients[at];
        if token.0 < client.next_miss {
            return;
        }
        client.next_miss = self.tokens;
        client.missed += 1;
        if client.missed >= MISSES {
            // With its queue its stream ends.
            self.clients.remove(at);
            self.abandon(|client| client == name);
        }
    }

    /// Puts a question to the next client that wants it and has room for it.
    fn put(&mut self, question: &Question) -> Option<u64> {
        let probe = question.event.probe;
        let at = self.clients.iter().position(|client| {
            (client.probes.is_empty() || client.probes.contains(&probe))
                && client.queue.try_send(question.clone()).is_ok()
        })?;
        let name = self.clients[at].name;
        self.clients.rotate_left(at + 1);
        Some(name)
    }

    /// Questions to clients that `gone` names fall to the default.
    fn abandon(&mut self, gone: impl Fn(u64) -> bool) {
        for open in &mut self.open {
            if open.verdict.is_none() && gone(open.client) {
                self.counts.unattended += 1;
                open.settle(Verdict::Unanswered);
            }
        }
    }
}

impl Decisions {
    fn state(&self) -> MutexGuard<'_, State> {
        // No step leaves the state half changed, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a client decide at the hits of `probes`, or of all probes that ask when it is empty,
    /// from now on. Questions it does not take wait for it; when there are too many, it is not asked.
    #[must_use]
    pub fn attach(&self, probes: impl IntoIterator<Item = ProbeId>) -> Asker {
        let probes = probes.into_iter().collect();
        let (queue, questions) = channel(QUEUE);
        let mut state = self.state();
        let name = state.names;
        state.names += 1;
        if !state.closed {
            state.clients.push(Client {
                name,
                probes,
                queue,
                missed: 0,
                next_miss: 0,
            });
        }
        drop(state);
        Asker {
            decisions: Self(Arc::clone(&self.0)),
            name,
            questions,
        }
    }

    /// Called by the thread of a virtual CPU: asks what to do at the hit that `event` tells of, to
    /// be answered `within` a time from its own. `None`, and counted, when there is nobody to ask.
    pub(crate) fn ask(&self, event: Event, within: Duration) -> Option<Asked<'_>> {
        let deadline = Instant::now() + within;
        let nanos = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX);
        let mut state = self.state();
        let token = Token(state.tokens);
        state.tokens += 1;
        let client = state.put(&Question {
            token,
            deadline_ns: event.host_ns.saturating_add(nanos),
            event,
        });
        let Some(client) = client else {
            state.counts.unattended += 1;
            return None;
        };
        state.open.push(Open {
            token,
            client,
            deadline,
            thread: thread::current(),
            verdict: None,
        });
        Some(Asked {
            decisions: self,
            token,
            deadline,
        })
    }

    /// What became of the questions so far.
    #[must_use]
    pub fn counts(&self) -> DecisionCounts {
        self.state().counts
    }

    /// The machine has ended: streams of questions end, and none is put any more.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.clients.clear();
        state.abandon(|_| true);
    }
}

/// A virtual CPU's open question, withdrawn when dropped.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    decisions: &'a Decisions,
    token: Token,
    deadline: Instant,
}

impl<'a> Asked<'a> {
    /// Waits for the answer, on the thread that asked. `wants_attention` is looked at whenever the
    /// thread is unparked.
    pub(crate) fn wait(self, wants_attention: impl Fn() -> bool) -> Reply<'a> {
        loop {
            // Whoever has news for this thread unparks it afterwards: news that come between a look
            // and the wait end the wait at once.
            let now = Instant::now();
            if let Some(verdict) = self.verdict(now) {
                return match verdict {
                    Verdict::Decided(decision) => Reply::Decided(decision),
                    Verdict::Unanswered => Reply::Unanswered,
                };
            }
            if wants_attention() {
                return Reply::Interrupted(self);
            }
            thread::park_timeout(self.deadline.saturating_duration_since(now));
        }
    }

    /// The verdict, if there is one by now; the question is closed then.
    fn verdict(&self, now: Instant) -> Option<Verdict> {
        let mut state = self.decisions.state();
        let at = state
            .open
            .iter()
            .position(|open| open.token == self.token)?;
        if let Some(verdict) = state.open[at].verdict.take() {
            state.open.swap_remove(at);
            return Some(verdict);
        }
        if now < self.deadline {
            return None;
        }
        let open = state.open.swap_remove(at);
        state.counts.expired += 1;
        state.missed(open.client, open.token);
        Some(Verdict::Unanswered)
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut state = self.decisions.state();
        state.open.retain(|open| open.token != self.token);
    }
}

/// A client that decides. Questions it leaves open when it goes are unanswered at once.
#[derive(Debug)]
pub struct Asker {
    decisions: Decisions,
    name: u64,
    questions: Receiver<Question>,
}

impl Asker {
    /// The next question; `None` when the machine has ended, or this client [was
    /// dropped](Asker::was_dropped). It may have lost its deadline while it
    /// waited to be taken. Cancel safe: no question is lost.
    pub async fn next(&mut self) -> Option<Question> {
        self.questions.recv().await
    }

    /// As [`Asker::next`], blocking the calling thread, which must not be one of an asynchronous
    /// runtime.
    pub fn blocking_next(&mut self) -> Option<Question> {
        self.questions.blocking_recv()
    }

    /// Whether it is asked no more although the machine has not ended, for it has missed [`MISSES`]
    /// deadlines one after another.
    #[must_use]
    pub fn was_dropped(&self) -> bool {
        let state = self.decisions.state();
        !state.closed && state.clients.iter().all(|client| client.name != self.name)
    }

    /// Answers a question, in any order.
    ///
    /// # Errors
    /// When the question is not open any more, or the decision exceeds a limit.
    pub fn answer(&self, token: Token, decision: Decision) -> Result<(), AnswerError> {
        decision.check()?;
        self.decisions.state().answer(self.name, token, decision)
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        let mut state = self.decisions.state();
        state.clients.retain(|client| client.name != self.name);
        state.abandon(|client| client == self.name);
    }
}

#[cfg(test)]
mod tests;
