//! What stands for the server inside this process in a program that was built without one (cargo feature `vmm`).
//!
//! Invariant: such a program links no KVM. What would start a server is an error that says so.

use super::Client;

/// Why no server can be started.
#[derive(Debug, thiserror::Error)]
#[error(
    "this program was built without machines of its own (cargo feature `vmm`): use those of a server, as with \
     `hvprobe vm boot` or `hvprobe doctor --socket PATH`"
)]
struct ClientAlone;

/// The server inside this process. There is none.
#[derive(Debug)]
pub(crate) enum InProcess {}

impl InProcess {
    /// Returns the error that this program cannot start a server.
    pub(crate) fn check() -> anyhow::Result<()> {
        Err(ClientAlone.into())
    }

    /// Starts no server.
    pub(crate) async fn start() -> anyhow::Result<(Self, Client)> {
        Err(ClientAlone.into())
    }

    /// Stops no server.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        match self {}
    }
}
