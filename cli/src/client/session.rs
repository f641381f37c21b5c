//! A session with a server. When this program ends for any reason, the server removes the probes and ends the
//! pauses that were requested in the session's name.
//!
//! Invariant: the session is renewed while it exists and the program runs. If the program is killed, the server
//! sees the connection end. If the program is stopped (SIGSTOP), the server misses the renewals.

use std::time::Duration;

use anyhow::{anyhow, bail};
use hvprobe_proto::v1::{
    HoldRequest, HoldResponse, OpenSession, RenewSession, SessionEnd, hold_request, hold_response,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;

use super::connection::Client;
use crate::failure::{Refused, answered};

/// Time without a renewal after which the server ends the session, in milliseconds.
const TTL_MS: u32 = 15_000;
/// Interval of the renewals.
const RENEW: Duration = Duration::from_secs(5);

/// Session of this program.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: String,
    answers: tonic::Streaming<HoldResponse>,
    /// Task that owns the client's end of the stream.
    renewing: JoinHandle<()>,
}

impl Session {
    /// Opens a session in the name of `owner`.
    pub(crate) async fn open(client: &mut Client, owner: String) -> anyhow::Result<Self> {
        let (to_server, messages) = mpsc::channel(1);
        let open = OpenSession {
            owner,
            ttl_ms: TTL_MS,
            ..Default::default()
        };
        to_server
            .send(request(hold_request::What::Open(open)))
            .await?;
        let mut answers = answered(client.sessions.hold(ReceiverStream::new(messages)).await)?;
        let first = answers.message().await.map_err(Refused::from)?;
        let Some(hold_response::What::Opened(session)) = first.and_then(|first| first.what) else {
            bail!("the server opened no session");
        };
        let renewing = tokio::spawn(async move {
            let renew = || request(hold_request::What::Renew(RenewSession {}));
            while to_server.send(renew()).await.is_ok() {
                sleep(RENEW).await;
            }
        });
        Ok(Self {
            id: session.id,
            answers,
            renewing,
        })
    }

    /// Waits until the server ends the session, and returns the reason.
    pub(crate) async fn lost(&mut self) -> anyhow::Error {
        let why = match self.answers.message().await {
            Ok(Some(HoldResponse {
                what: Some(hold_response::What::Ended(ended)),
                ..
            })) => match ended.reason() {
                SessionEnd::Expired => "this program did not run for too long",
                SessionEnd::TakenOver => "another client took its probes over",
                SessionEnd::ServerStopping => "the server is stopping",
                SessionEnd::Unspecified | SessionEnd::Disconnected => "the server ended it",
            },
            Ok(_) => "the server went away",
            Err(status) => return Refused::from(status).into(),
        };
        anyhow!("the session of the planted probes is over: {why}")
    }

    /// Ends the session, and waits until the server has removed its probes and ended its pauses.
    pub(crate) async fn close(mut self) -> anyhow::Result<()> {
        self.renewing.abort();
        // The client's end of the stream is dropped with the task.
        let _aborted = (&mut self.renewing).await;
        while self
            .answers
            .message()
            .await
            .map_err(Refused::from)?
            .is_some()
        {}
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

fn request(what: hold_request::What) -> HoldRequest {
    HoldRequest { what: Some(what) }
}
