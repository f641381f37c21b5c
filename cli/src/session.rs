//! A session with a server: what is asked for in its name goes with this program, however it ends.
//!
//! Invariant: the session is renewed for as long as this lives and the program runs. Of a program that is
//! killed the server sees the connection end; of one that is stopped, that nothing comes any more.

use std::time::Duration;

use anyhow::{anyhow, bail};
use hvprobe_proto::v1::{
    HoldRequest, HoldResponse, OpenSession, RenewSession, SessionEnd, hold_request, hold_response,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;

use crate::client::Client;
use crate::failure::Refused;

/// How long the server waits for this program, in milliseconds, and how often it hears of it.
const TTL_MS: u32 = 15_000;
const RENEW: Duration = Duration::from_secs(5);

/// A session that this program holds.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: String,
    answers: tonic::Streaming<HoldResponse>,
    /// Has our end of the stream.
    renewing: JoinHandle<()>,
}

impl Session {
    /// Opens one, in the name of `owner`.
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
        let answers = client.sessions.hold(ReceiverStream::new(messages)).await;
        let mut answers = answers.map_err(Refused::from)?.into_inner();
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

    /// Returns when the server has ended the session, and why.
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

    /// Ends it; returns when all that was asked for in its name is gone.
    pub(crate) async fn close(mut self) -> anyhow::Result<()> {
        self.renewing.abort();
        // With the task goes our end of the stream.
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
