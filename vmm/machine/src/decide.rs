//! Questions that vCPUs ask clients at hits, and the answers.
//!
//! ```text
//!          ask                     answer, in time
//!   hit ────────► open ─────────────────────────────► decided
//!    │             │ the deadline passes, the client
//!    │ nobody      │ goes, or the machine ends
//!    └─────────────┴─────────────────────────────────► unanswered: the probe's default
//! ```
//! A question goes to one client, which may answer until the deadline. The vCPU that asks waits in its own thread.
//! If the machine requests the vCPU's attention meanwhile, the vCPU parks and then waits again: the question stays
//! open, and the deadline does not change.
//!
//! A client that misses [`MISSES`] deadlines one after another is not asked any more. It is frozen, or has gone
//! without notice, and each question to it costs the guest the time until a deadline. Questions that were open at
//! the same time count as one miss.
//!
//! Invariants: a vCPU has at most one question open; each question gets one verdict; no vCPU waits for a client
//! that has gone. The lock is never held together with another, nor while waiting, and hits that ask nothing do
//! not take it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Event;
use hvprobe_spec::{Decision, ProbeId, SpecError};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Identifies a question of a machine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// A question: a vCPU waits at a hit for a client's decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Token that the answer must contain.
    pub token: Token,
    /// The hit.
    pub event: Event,
    /// Deadline, in nanoseconds of the host's `CLOCK_MONOTONIC`. After the deadline, the probe's default applies.
    pub deadline_ns: u64,
}

/// Reason why an answer has no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// There is no such question, the question is closed, or it was put to another client.
    #[error("question {} is not open: its deadline has passed, or it was not put to this client", .0.0)]
    TooLate(Token),
    /// The decision exceeds a limit. The question stays open.
    #[error("the decision cannot be carried out")]
    Invalid(#[from] SpecError),
}

/// Counts of a machine's questions by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecisionCounts {
    /// Answered in time.
    pub answered: u64,
    /// The deadline passed.
    pub expired: u64,
    /// There was no client to ask, or the client has gone.
    pub unattended: u64,
}

/// Result of a vCPU's wait for an answer.
#[derive(Debug)]
pub(crate) enum Reply<'a> {
    /// A client decided.
    Decided(Decision),
    /// The probe's default applies.
    Unanswered,
    /// The machine requests attention: the vCPU must park, and then wait again.
    Interrupted(Asked<'a>),
}

/// Passes questions to clients and answers to vCPUs.
#[derive(Debug, Default)]
pub struct Decisions(Arc<Mutex<State>>);

/// Number of deadlines, missed one after another, at which a client is dropped.
pub const MISSES: u32 = 3;

/// Maximum number of questions that wait for one client. Each vCPU has at most one open question. If more wait, the
/// deadlines of the others have passed.
const QUEUE: usize = 256;

#[derive(Debug, Default)]
struct State {
    closed: bool,
    /// Clients, the next one to ask first.
    clients: Vec<Client>,
    /// Open questions, at most one of each vCPU.
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
    /// Number of deadlines missed since the last answer.
    missed: u32,
    /// Token of the first question after the last miss. Only a missed deadline of this or of a later question
    /// counts as another miss.
    next_miss: u64,
}

#[derive(Debug)]
struct Open {
    token: Token,
    /// Name of the client that was asked.
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
    /// Gives the waiting vCPU its verdict. There must be none yet.
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

    /// Counts that client `name` has missed the deadline of question `token`. Drops the client at [`MISSES`]
    /// misses.
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
            // Dropping its queue ends its stream.
            self.clients.remove(at);
            self.abandon(|client| client == name);
        }
    }

    /// Puts a question to the next client that wants it and has room for it. Returns the client's name.
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

    /// Settles the open questions of the clients for which `gone` is true: the probes' defaults apply.
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
        // No step leaves the state half changed, so a panic elsewhere does not corrupt it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attaches a client that decides at later hits of `probes` or, if `probes` is empty, of all probes that ask.
    /// Questions wait until the client takes them. While too many wait, the client is not asked.
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

    /// Asks a client for a decision about the hit of `event`. The time limit of the answer is `within`. Called by
    /// the vCPU's thread. Returns `None` when there is no client to ask, which is counted.
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

    /// Returns the counts of questions so far.
    #[must_use]
    pub fn counts(&self) -> DecisionCounts {
        self.state().counts
    }

    /// Ends the streams of questions, because the machine has ended. No question is put to a client any more.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.clients.clear();
        state.abandon(|_| true);
    }
}

/// Open question of a vCPU; dropping it withdraws the question.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    decisions: &'a Decisions,
    token: Token,
    deadline: Instant,
}

impl<'a> Asked<'a> {
    /// Waits for the answer, on the thread that asked. Checks `wants_attention` whenever the thread is
    /// unparked.
    pub(crate) fn wait(self, wants_attention: impl Fn() -> bool) -> Reply<'a> {
        loop {
            // Other threads unpark this one after they have changed something. So a change between these checks and
            // the wait ends the wait at once.
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

    /// Returns the verdict and closes the question, if there is a verdict or the deadline has passed by `now`.
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

/// A client that decides. When this value is dropped, the open questions of the client stay unanswered, and their
/// vCPUs continue at once.
#[derive(Debug)]
pub struct Asker {
    decisions: Decisions,
    name: u64,
    questions: Receiver<Question>,
}

impl Asker {
    /// Waits for the next question, and returns it; `None` when the machine has ended or this client [was
    /// dropped](Asker::was_dropped). The deadline may have passed while the question waited to be taken. Cancel
    /// safe: no question is lost.
    pub async fn next(&mut self) -> Option<Question> {
        self.questions.recv().await
    }

    /// Like [`Asker::next`], but blocks the calling thread, which must not belong to an
    /// asynchronous runtime.
    pub fn blocking_next(&mut self) -> Option<Question> {
        self.questions.blocking_recv()
    }

    /// Returns whether the client is not asked any more because it has missed [`MISSES`] deadlines one after
    /// another. Always `false` once the machine has ended.
    #[must_use]
    pub fn was_dropped(&self) -> bool {
        let state = self.decisions.state();
        !state.closed && state.clients.iter().all(|client| client.name != self.name)
    }

    /// Answers a question. Questions can be answered in any order.
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
