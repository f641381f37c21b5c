//! The connection to the server that the options name. If it fails, the error says how to start such a server.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{anyhow, bail};
use hvprobe_proto::v1::{self, ConsoleOutput, ListMachinesRequest, MachineState};
use hvprobe_proto::{ConnectError, Token};
use prost_types::FieldMask;
use tonic::Streaming;

use crate::failure::{Refused, WrongUsage};
use crate::options::server::{OnMachine, ServerAt, SocketAt};
use crate::output::values::source_lines::Lines;

/// A connection to a server. Dereferences to the gRPC client, which has a field for each service.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    services: hvprobe_proto::Client,
    /// Source lines of a machine's kernel and modules, if the client has their debug information.
    pub(crate) lines: Option<Arc<Lines>>,
}

impl Deref for Client {
    type Target = hvprobe_proto::Client;

    fn deref(&self) -> &Self::Target {
        &self.services
    }
}

impl DerefMut for Client {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.services
    }
}

impl From<hvprobe_proto::Client> for Client {
    fn from(services: hvprobe_proto::Client) -> Self {
        let lines = None;
        Self { services, lines }
    }
}

/// Adds to `error` what the user can do about it. `start` is the command that starts the missing server.
fn with_way_out(error: ConnectError, start: &str) -> anyhow::Error {
    match error {
        ConnectError::NoServer(_) if cfg!(feature = "vmm") => {
            anyhow!("{error}; start one with `{start}`")
        }
        ConnectError::NoServer(_) => {
            anyhow!("{error}; start one with `{start}` of a program with the cargo feature `vmm`")
        }
        ConnectError::Untrusted { .. } => {
            anyhow!("{error}: call it as that user, or over TCP with its token (--connect)")
        }
        error => error.into(),
    }
}

impl Client {
    /// Connects to the server at `server`.
    pub(crate) async fn connect(server: &ServerAt) -> anyhow::Result<Self> {
        let (connected, start) = match (server.connect, &server.token_file) {
            (Some(url), Some(file)) => {
                // Reads the token before the server sees a connection.
                let token = Token::read(file)?;
                let (address, file) = (url.0, file.display());
                let start = format!("hvprobe serve --listen {address} --token-file {file}");
                (hvprobe_proto::Client::tcp(address, &token).await, start)
            }
            _ => {
                let path = socket_path(&server.at);
                let connected = hvprobe_proto::Client::unix(&path).await;
                (connected, "hvprobe serve".to_owned())
            }
        };
        let services = connected.map_err(|error| with_way_out(error, &start))?;
        Ok(services.into())
    }

    /// Connects to the server and finds the machine that `on` names.
    pub(crate) async fn on_machine(on: &OnMachine) -> anyhow::Result<(Self, String)> {
        let mut client = Self::connect(&on.server).await?;
        let machine = client.machine(on.vm.as_deref()).await?;
        Ok((client, machine))
    }

    /// Returns `name` if it was given, else the name of the only machine that is not stopped.
    pub(crate) async fn machine(&mut self, name: Option<&str>) -> anyhow::Result<String> {
        if let Some(name) = name {
            return Ok(name.to_owned());
        }
        let live = [
            MachineState::Booting,
            MachineState::Running,
            MachineState::Paused,
        ];
        let request = ListMachinesRequest {
            states: live.map(i32::from).into(),
            read_mask: Some(FieldMask {
                paths: vec!["name".to_owned(), "state".to_owned()],
            }),
            ..ListMachinesRequest::default()
        };
        let machines = self.list_machines(request).await?;
        let running = machines.into_iter();
        // A server that does not know the field `states` lists all machines.
        let running = running.filter(|machine| machine.state() != MachineState::Stopped);
        let running: Vec<String> = running.map(|machine| machine.name).collect();
        match running.as_slice() {
            [] => bail!("no machine runs; boot one with `hvprobe vm boot`"),
            [only] => Ok(only.clone()),
            several => {
                let names = several.join(", ");
                Err(WrongUsage(format!("several machines run, name one: {names}")).into())
            }
        }
    }

    /// Asks the server to describe `machine`.
    pub(crate) async fn get_machine(&mut self, machine: String) -> Result<v1::Machine, Refused> {
        Ok(self.services.get_machine(machine).await?)
    }

    /// Streams the console output of `machine`. If `kept_only` is set, the stream ends after the part that the
    /// server keeps.
    pub(crate) async fn console(
        &mut self,
        machine: String,
        kept_only: bool,
    ) -> Result<Streaming<ConsoleOutput>, Refused> {
        Ok(self.services.console(machine, kept_only).await?)
    }

    /// Lists all machines that match `request`.
    pub(crate) async fn list_machines(
        &mut self,
        request: ListMachinesRequest,
    ) -> Result<Vec<v1::Machine>, Refused> {
        Ok(self.services.list_machines(request).await?)
    }

    /// Lists the probes of `machine`.
    pub(crate) async fn list_probes(&mut self, machine: &str) -> Result<Vec<v1::Probe>, Refused> {
        self.list_probes_of(machine, "").await
    }

    /// Lists the probes of sessions with this `owner`, or all probes if `owner` is empty.
    pub(crate) async fn list_probes_of(
        &mut self,
        machine: &str,
        owner: &str,
    ) -> Result<Vec<v1::Probe>, Refused> {
        Ok(self.services.list_probes(machine, owner).await?)
    }
}

/// Returns the path of the server's socket, as given or by default.
pub(crate) fn socket_path(at: &SocketAt) -> PathBuf {
    let from = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let given = at.socket.clone();
    given
        .or_else(|| from("HVPROBE_SOCKET").map(PathBuf::from))
        .unwrap_or_else(|| {
            let folder = from("XDG_RUNTIME_DIR");
            folder
                .as_deref()
                .map_or(Path::new("/run"), Path::new)
                .join("hvprobe.sock")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_starts_no_server_names_one_that_does() {
        let error = ConnectError::NoServer("/run/s".to_owned());
        let shown = with_way_out(error, "hvprobe serve").to_string();
        let expected = "no server listens on /run/s; start one with `hvprobe serve`";
        match cfg!(feature = "vmm") {
            true => assert_eq!(shown, expected),
            false => assert_eq!(
                shown,
                format!("{expected} of a program with the cargo feature `vmm`")
            ),
        }
    }
}
