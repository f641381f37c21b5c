//! A server inside this process, connected by an in-memory pipe: `run` and `doctor` need no other.

use anyhow::Context as _;
use hvprobe_server::{ServeError, Server};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::connection::Client;

/// Maximum number of bytes in flight in each direction.
const PIPE: usize = 1 << 20;

/// In-process server. Unless it is [stopped](Self::stop), its machines die with the process.
#[derive(Debug)]
pub(crate) struct InProcess {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl InProcess {
    /// Returns no error, because this program can start a server.
    pub(crate) fn check() -> anyhow::Result<()> {
        Ok(())
    }

    /// Starts a server and connects to it.
    pub(crate) async fn start() -> anyhow::Result<(Self, Client)> {
        let (ours, theirs) = tokio::io::duplex(PIPE);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(Server::new().serve_connection(theirs, async {
            // A dropped sender also requests a stop.
            let _asked_or_dropped = stopped.await;
        }));
        let client = hvprobe_proto::Client::over(ours, None).await?.into();
        Ok((Self { stop, task }, client))
    }

    /// Detaches the probes, ends the guests, and waits until all are gone.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        // The message fails only if the server has already ended.
        let _gone = self.stop.send(());
        self.task.await.context("the server panicked")??;
        Ok(())
    }
}
