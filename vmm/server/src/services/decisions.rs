//! `hvprobe.v1.Decisions`.
//!
//! ```text
//!   opened ──(DecideFor)──► deciding ──(either stream, the session or the machine ends, a bad answer,
//!                                       or too many deadlines missed)──► over
//! ```
//! Invariants: while a client decides, every question of its probes is either waiting for that client's answer or
//! answered. When the stream ends, the asker is dropped, and open questions get the default decision.

use std::collections::{HashMap, HashSet};

use hvprobe_machine::{AnswerError, Asker, MISSES, Question, Token};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::actions::Hold;
use hvprobe_proto::v1::{
    self, Answer, DecideFor, DecideRequest, DecideResponse, ErrorKind, SessionEnd, decide_request,
    decide_response,
    decisions_server::{self, DecisionsServer},
};
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::{Decision, ProbeId, chain};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::bounds::limits;
use crate::calls::panics;
use crate::machines::{Fleet, Handle};
use crate::sessions::keeper::{Sessions, ended};
use crate::status::out_of_order;
use crate::wire::{anchor, event};

/// Capacity of the queue of messages to one client.
const MESSAGES: usize = 16;

#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
    sessions: Sessions<Handle>,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server(fleet: Fleet, sessions: Sessions<Handle>) -> DecisionsServer<Self> {
        DecisionsServer::new(Self { fleet, sessions }).max_decoding_message_size(limits::MESSAGE)
    }
}

type Responses = ReceiverStream<Result<DecideResponse, Status>>;

#[tonic::async_trait]
impl decisions_server::Decisions for Service {
    type DecideStream = Responses;

    async fn decide(
        &self,
        request: Request<Streaming<DecideRequest>>,
    ) -> Result<Response<Responses>, Status> {
        let mut answers = request.into_inner();
        let first = answers.message().await?.and_then(|first| first.what);
        let Some(decide_request::What::DecideFor(decide_for)) = first else {
            let message = "the first message has to say what to decide for";
            return Err(out_of_order(message));
        };
        let DecideFor {
            machine,
            probes,
            session,
        } = decide_for;
        limits::at_most("the number of probes", probes.len(), limits::BATCH)?;
        let over = self.sessions.follow(&session)?;
        let handle = self.fleet.get(&machine)?;
        let chosen = handle.probes(move |known| {
            let chosen = choose(&probes, known)?;
            Ok::<_, Status>((probes, chosen))
        });
        let (ids, chosen) = chosen.await??;
        let ids = ids.into_iter().map(ProbeId);
        let asker = handle.port()?.attach(ids);

        let decide = |to_client| {
            let desk = Desk {
                asker,
                answers,
                to_client,
                over,
                anchor: anchor::LastSent::default(),
            };
            desk.run(chosen)
        };
        Ok(Response::new(panics::stream(MESSAGES, decide)))
    }
}

/// Returns those of the `known` probes that `ids` names. Fails unless all of them exist, and ask a client at their
/// hits.
fn choose(ids: &[u32], known: Vec<v1::Probe>) -> Result<Vec<v1::Probe>, Status> {
    if ids.is_empty() {
        let message = "name the probes to decide for";
        return Err(Failure::invalid(ErrorKind::NoSuchProbe, message).into());
    }
    let by_id: HashMap<u32, &v1::Probe> = known.iter().map(|probe| (probe.id, probe)).collect();
    for (index, id) in ids.iter().enumerate() {
        let Some(probe) = by_id.get(id) else {
            let message = format!("there is no probe {id} (index {index})");
            let failure = Failure::new(Code::NotFound, ErrorKind::NoSuchProbe, message);
            return Err(failure.at_index(index).into());
        };
        let hold = probe.actions.as_ref().and_then(|all| all.hold.as_ref());
        if !matches!(hold, Some(Hold::Ask(_))) {
            let message = format!("probe {id} asks nobody: register it with a deadline to ask by");
            let failure = Failure::invalid(ErrorKind::BadActions, message);
            return Err(failure.at_index(index).into());
        }
    }
    let wanted: HashSet<u32> = ids.iter().copied().collect();
    let mut chosen = known;
    chosen.retain(|probe| wanted.contains(&probe.id));
    Ok(chosen)
}

/// A client that decides.
struct Desk {
    asker: Asker,
    answers: Streaming<DecideRequest>,
    to_client: mpsc::Sender<Result<DecideResponse, Status>>,
    /// Reports the end of the client's session, if it has one.
    over: Option<watch::Receiver<Option<SessionEnd>>>,
    /// Last anchor that the client was sent.
    anchor: anchor::LastSent,
}

/// Why the client stops deciding.
enum Over {
    /// The client is gone, or done.
    Gone,
    /// The client is sent this error.
    Because(Status),
}

impl Desk {
    async fn run(mut self, probes: Vec<v1::Probe>) {
        if let Err(Over::Because(status)) = self.decide(probes).await {
            // A client that is gone needs no reason.
            let _gone = self.to_client.send(Err(status)).await;
        }
    }

    async fn decide(&mut self, probes: Vec<v1::Probe>) -> Result<(), Over> {
        self.send(None, probes).await?;
        loop {
            tokio::select! {
                question = self.asker.next() => match question {
                    Some(question) => self.put(&question).await?,
                    None if self.asker.was_dropped() => return Err(Over::Because(unresponsive())),
                    // The machine has ended, and so does the stream.
                    None => return Ok(()),
                },
                answer = self.answers.message() => match answer {
                    Ok(Some(answer)) => self.take(answer).await?,
                    Ok(None) | Err(_) => return Err(Over::Gone),
                },
                () = self.to_client.closed() => return Err(Over::Gone),
                () = end_of(&mut self.over) => return Err(Over::Because(session_ended())),
            }
        }
    }

    /// Sends a question to the client.
    async fn put(&mut self, question: &Question) -> Result<(), Over> {
        let question = v1::Question {
            token: question.token.0,
            event: Some(event::decoded(&question.event)),
            deadline_ns: question.deadline_ns,
        };
        let what = decide_response::What::Question(question);
        self.send(Some(what), Vec::new()).await
    }

    /// Passes an answer to the machine.
    async fn take(&mut self, request: DecideRequest) -> Result<(), Over> {
        let Some(decide_request::What::Answer(Answer { token, decision })) = request.what else {
            let message = "only answers can follow the first message";
            return Err(Over::Because(out_of_order(message)));
        };
        let bad = |error: &dyn std::error::Error| {
            let message = format!("the answer to question {token}: {}", chain(error));
            Over::Because(Failure::invalid(ErrorKind::BadActions, message).into())
        };
        let decision = Decision::from_wire(decision.unwrap_or_default()).map_err(|e| bad(&e))?;
        match self.asker.answer(Token(token), decision) {
            Ok(()) => Ok(()),
            Err(AnswerError::Invalid(error)) => Err(bad(&error)),
            Err(AnswerError::TooLate(_)) => {
                let what = decide_response::What::TooLate(v1::TooLate { token });
                self.send(Some(what), Vec::new()).await
            }
        }
    }

    async fn send(
        &mut self,
        what: Option<decide_response::What>,
        probes: Vec<v1::Probe>,
    ) -> Result<(), Over> {
        let message = DecideResponse {
            what,
            probes,
            anchor: self.anchor.news(anchor::now()),
        };
        let sent = self.to_client.send(Ok(message)).await;
        sent.map_err(|_| Over::Gone)
    }
}

/// Waits until the client's session has ended; forever if it has no session.
async fn end_of(over: &mut Option<watch::Receiver<Option<SessionEnd>>>) {
    match over {
        Some(over) => {
            ended(over).await;
        }
        None => std::future::pending().await,
    }
}

fn session_ended() -> Status {
    let message = "the session has ended in which this client decided";
    Failure::new(Code::Aborted, ErrorKind::SessionEnded, message).into()
}

fn unresponsive() -> Status {
    let message = format!("{MISSES} questions one after another were not answered in time");
    Failure::new(Code::DeadlineExceeded, ErrorKind::Unresponsive, message).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(id: u32, hold: Option<Hold>) -> v1::Probe {
        v1::Probe {
            id,
            actions: Some(v1::Actions {
                hold,
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn only_probes_that_ask_can_be_decided_for() {
        let ask = || Some(Hold::Ask(v1::Ask::default()));
        let known = || {
            vec![
                probe(1, ask()),
                probe(2, None),
                probe(3, Some(Hold::Stop(v1::StopMachine {}))),
                probe(4, ask()),
            ]
        };
        let chosen = |ids: &[u32]| {
            choose(ids, known())
                .map(|probes| probes.iter().map(|probe| probe.id).collect::<Vec<_>>())
                .map_err(|status| status.code())
        };
        assert_eq!(chosen(&[4, 1]), Ok(vec![1, 4]));
        assert_eq!(chosen(&[]), Err(Code::InvalidArgument));
        assert_eq!(chosen(&[1, 2]), Err(Code::InvalidArgument));
        assert_eq!(chosen(&[3]), Err(Code::InvalidArgument));
        assert_eq!(chosen(&[1, 5]), Err(Code::NotFound));
    }
}
