//! Stand-in for the server inside this process, for a program that was built without the cargo feature `vmm`.
//!
//! Invariant: such a program links no code for KVM. Each attempt to start a server fails with an error that names
//! the missing feature.

use super::connection::Client;

/// Why no server can be started.
#[derive(Debug, thiserror::Error)]
#[error(
    "this program was built without machines of its own (cargo feature `vmm`): use those of a server, as with \
     `hvprobe vm boot` or `hvprobe doctor --socket PATH`"
)]
struct ClientAlone;

/// The server inside this process. No value of this type exists.
#[derive(Debug)]
pub(crate) enum InProcess {}

impl InProcess {
    /// Returns the error that this program cannot start a server.
    pub(crate) fn check() -> anyhow::Result<()> {
        Err(ClientAlone.into())
    }

    /// Fails, because this program cannot start a server.
    pub(crate) async fn start() -> anyhow::Result<(Self, Client)> {
        Err(ClientAlone.into())
    }

    /// Is never called, because no value of this type exists.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        match self {}
    }
}
