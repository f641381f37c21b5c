//! A server inside this process, reached over a pipe in memory: `run` and `doctor` need no other.

use anyhow::Context as _;
use hvprobe_server::{ServeError, Server};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::client::Client;

/// Bytes in flight each way.
const PIPE: usize = 1 << 20;

/// The server; it has to be [stopped](Self::stop), or its machines die with the process.
#[derive(Debug)]
pub(crate) struct InProcess {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl InProcess {
    /// Starts a server and connects to it.
    pub(crate) async fn start() -> anyhow::Result<(Self, Client)> {
        let (ours, theirs) = tokio::io::duplex(PIPE);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(Server::new().serve_connection(theirs, async {
            // A sender that is dropped asks for the same.
            let _asked_or_dropped = stopped.await;
        }));
        let client = Client::over(ours, None).await?;
        Ok((Self { stop, task }, client))
    }

    /// Takes the probes out, ends the guests, and returns when all are gone.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        // A server that is gone already needs no telling.
        let _gone = self.stop.send(());
        self.task.await.context("the server panicked")??;
        Ok(())
    }
}
