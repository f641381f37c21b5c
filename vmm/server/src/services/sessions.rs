//! `hvprobe.v1.Sessions`.
//!
//! ```text
//!   opened ──(open)──► held ──(the stream ends, nothing comes in time, taken over)──► ending ──► over
//!                       │ ▲
//!                       └─┘ renew
//! ```
//! Invariants: the session is open exactly while its task holds it; the last message is sent after everything
//! that the session owned has been cleaned up.

use std::time::Duration;

use hvprobe_proto::Failure;
use hvprobe_proto::v1::{
    ErrorKind, HoldRequest, HoldResponse, ListSessionsRequest, ListSessionsResponse, OpenSession,
    Session, SessionEnd, SessionEnded, hold_request, hold_response,
    sessions_server::{self, SessionsServer},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use crate::bounds::limits;
use crate::calls::panics;
use crate::machines::Handle;
use crate::sessions::keeper::{Asked, Open, Place, Sessions, ended};
use crate::status::out_of_order;
use crate::wire::{anchor, page};

/// Capacity of the queue of messages to one client: all messages of one session.
const MESSAGES: usize = 2;
/// Minimum time that a session outlives the last message of its client.
const SHORTEST: Duration = Duration::from_secs(1);
/// Maximum time that a session outlives the last message of its client.
const LONGEST: Duration = Duration::from_hours(1);
/// Time that a session outlives the last message of its client, unless the client chooses another one.
const DEFAULT: Duration = Duration::from_secs(30);
/// Maximum number of sessions to take over at once.
const TAKE_OVER: usize = 64;

#[derive(Debug)]
pub(crate) struct Service {
    sessions: Sessions<Handle>,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server(sessions: Sessions<Handle>) -> SessionsServer<Self> {
        SessionsServer::new(Self { sessions }).max_decoding_message_size(limits::MESSAGE)
    }
}

type Answer = Result<HoldResponse, Status>;
type Answers = ReceiverStream<Answer>;

#[tonic::async_trait]
impl sessions_server::Sessions for Service {
    type HoldStream = Answers;

    async fn hold(
        &self,
        request: Request<Streaming<HoldRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let answers = hold(&self.sessions, request.into_inner()).await?;
        Ok(Response::new(ReceiverStream::new(answers)))
    }

    async fn list_sessions(
        &self,
        request: Request<ListSessionsRequest>,
    ) -> Result<Response<ListSessionsResponse>, Status> {
        let list = list(&self.sessions, request.into_inner())?;
        Ok(Response::new(list))
    }
}

/// Returns the requested page of sessions.
fn list<P: Place>(
    sessions: &Sessions<P>,
    request: ListSessionsRequest,
) -> Result<ListSessionsResponse, Status> {
    let ListSessionsRequest {
        page_size,
        page_token,
        owner,
    } = request;
    let mut all = sessions.all();
    all.retain(|(_, session)| owner.is_empty() || session.owner == owner);
    let (sessions, next_page_token) = page::of_numbered(all, page_size, &page_token)?;
    Ok(ListSessionsResponse {
        sessions,
        next_page_token,
        anchor: Some(anchor::now()),
    })
}

/// Opens the session that the first of `messages` asks for, and spawns a task that holds it as long as the
/// messages keep it open.
async fn hold<P: Place>(
    sessions: &Sessions<P>,
    mut messages: impl Stream<Item = Result<HoldRequest, Status>> + Unpin + Send + 'static,
) -> Result<mpsc::Receiver<Answer>, Status> {
    let first = messages.next().await.transpose()?;
    let Some(hold_request::What::Open(open)) = first.and_then(|first| first.what) else {
        return Err(out_of_order("the first message has to open the session"));
    };
    let asked = asked(open)?;
    let ttl = asked.ttl;
    let (open, session) = sessions.open(asked)?;
    let (to_client, answers) = mpsc::channel(MESSAGES);
    let holding = Holding {
        open,
        ttl,
        messages,
        to_client: to_client.clone(),
    };
    panics::spawn(to_client, holding.run(session));
    Ok(answers)
}

/// Checks the session that a client asks for.
fn asked(open: OpenSession) -> Result<Asked, Status> {
    let OpenSession {
        owner,
        ttl_ms,
        keep,
        take_over,
    } = open;
    limits::owner_name(&owner)?;
    let ttl = match ttl_ms {
        0 => DEFAULT,
        ttl_ms => Duration::from_millis(ttl_ms.into()),
    };
    if !(SHORTEST..=LONGEST).contains(&ttl) {
        let message = format!(
            "a session outlives its client by {} to {} ms, not by {ttl_ms} ms",
            SHORTEST.as_millis(),
            LONGEST.as_millis()
        );
        return Err(Failure::invalid(ErrorKind::BadTtl, message).into());
    }
    let what = "the number of sessions to take over";
    limits::at_most(what, take_over.len(), TAKE_OVER)?;
    Ok(Asked {
        owner,
        ttl,
        keep,
        take_over,
    })
}

/// A session and the client that holds it.
struct Holding<P: Place, M> {
    open: Open<P>,
    ttl: Duration,
    messages: M,
    to_client: mpsc::Sender<Answer>,
}

impl<P: Place, M> Holding<P, M>
where
    M: Stream<Item = Result<HoldRequest, Status>> + Unpin,
{
    async fn run(mut self, session: Session) {
        let opened = HoldResponse {
            what: Some(hold_response::What::Opened(session)),
            anchor: Some(anchor::now()),
        };
        let held = match self.to_client.send(Ok(opened)).await {
            Ok(()) => self.hold().await,
            Err(_) => Ok(SessionEnd::Disconnected),
        };
        let reason = *held.as_ref().unwrap_or(&SessionEnd::Disconnected);
        let let_go = self.open.end(reason).await;
        let last = held.map(|reason| HoldResponse {
            what: Some(hold_response::What::Ended(SessionEnded {
                reason: reason.into(),
                let_go,
            })),
            anchor: None,
        });
        // The client may be gone.
        let _gone = self.to_client.send(last).await;
    }

    /// Holds the session until it has to end. Returns why it ends, or what the client did wrong.
    async fn hold(&mut self) -> Result<SessionEnd, Status> {
        let mut over = self.open.over.clone();
        loop {
            tokio::select! {
                biased;
                why = ended(&mut over) => return Ok(why),
                // A message that arrived in time counts, even if it is read late.
                message = self.messages.next() => match message {
                    Some(Ok(HoldRequest { what: Some(hold_request::What::Renew(_)) })) => {}
                    Some(Ok(_)) => return Err(out_of_order("the session is open: renew it")),
                    Some(Err(_)) | None => return Ok(SessionEnd::Disconnected),
                },
                () = self.to_client.closed() => return Ok(SessionEnd::Disconnected),
                () = tokio::time::sleep(self.ttl) => return Ok(SessionEnd::Expired),
            }
        }
    }
}

#[cfg(test)]
mod tests;
