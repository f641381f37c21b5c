//! The client's end of the gRPC interface.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use hvprobe_proto::v1::decisions_client::DecisionsClient;
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::host_client::HostClient;
use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::probes_client::ProbesClient;
use hvprobe_proto::v1::symbols_client::SymbolsClient;
use hvprobe_proto::v1::{self, ListMachinesRequest, ListProbesRequest, MachineState};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::args::{OnMachine, ServerAt};
use crate::failure::{Refused, WrongUsage};

/// Bytes of the longest list of probes we take: of all a machine can reasonably have, with all they
/// are to do.
const LISTS: usize = 256 << 20;

/// A connection to a server.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) machines: MachinesClient<Channel>,
    pub(crate) probes: ProbesClient<Channel>,
    pub(crate) events: EventsClient<Channel>,
    pub(crate) decisions: DecisionsClient<Channel>,
    pub(crate) symbols: SymbolsClient<Channel>,
    pub(crate) host: HostClient<Channel>,
}

impl Client {
    /// Connects to the server at `socket`.
    pub(crate) async fn connect(server: &ServerAt) -> anyhow::Result<Self> {
        let path = socket_path(server);
        match UnixStream::connect(&path).await {
            Ok(stream) => Self::over(stream).await,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                bail!(
                    "no server listens on {}; start one with `hvprobe serve`",
                    path.display()
                )
            }
            Err(error) => {
                Err(error).with_context(|| format!("cannot connect to {}", path.display()))
            }
        }
    }

    /// Talks to a server over `stream`.
    pub(crate) async fn over(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> anyhow::Result<Self> {
        let mut stream = Some(TokioIo::new(stream));
        // There is one stream, so it cannot be connected to again once it is lost.
        let connector = tower::service_fn(move |_: Uri| {
            let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
            async move { stream.map_err(io::Error::from) }
        });
        let channel = Endpoint::from_static("http://hvprobe")
            .connect_with_connector(connector)
            .await
            .context("the server does not speak gRPC")?;
        Ok(Self {
            machines: MachinesClient::new(channel.clone()).max_decoding_message_size(LISTS),
            probes: ProbesClient::new(channel.clone()).max_decoding_message_size(LISTS),
            events: EventsClient::new(channel.clone()),
            decisions: DecisionsClient::new(channel.clone()),
            symbols: SymbolsClient::new(channel.clone()),
            host: HostClient::new(channel),
        })
    }

    /// Connects to the server and finds the machine that `on` means.
    pub(crate) async fn on_machine(on: &OnMachine) -> anyhow::Result<(Self, String)> {
        let mut client = Self::connect(&on.server).await?;
        let machine = client.machine(on.vm.as_deref()).await?;
        Ok((client, machine))
    }

    /// The machine of that name; without a name, the only one that runs.
    pub(crate) async fn machine(&mut self, name: Option<&str>) -> anyhow::Result<String> {
        if let Some(name) = name {
            return Ok(name.to_owned());
        }
        let answer = self
            .machines
            .list_machines(ListMachinesRequest {})
            .await
            .map_err(Refused::from)?;
        let mut running: Vec<String> = answer
            .into_inner()
            .machines
            .into_iter()
            .filter(|machine| machine.state() != MachineState::Stopped)
            .map(|machine| machine.name)
            .collect();
        match (running.pop(), running.is_empty()) {
            (Some(only), true) => Ok(only),
            (Some(last), false) => {
                running.push(last);
                Err(WrongUsage(format!(
                    "several machines run, name one: {}",
                    running.join(", ")
                ))
                .into())
            }
            (None, _) => bail!("no machine runs; boot one with `hvprobe vm boot`"),
        }
    }

    /// The probes of `machine`.
    pub(crate) async fn list_probes(&mut self, machine: &str) -> anyhow::Result<Vec<v1::Probe>> {
        let mut all = Vec::new();
        let mut request = ListProbesRequest {
            machine: machine.to_owned(),
            ..Default::default()
        };
        loop {
            let answer = self.probes.list_probes(request.clone()).await;
            let page = answer.map_err(Refused::from)?.into_inner();
            all.extend(page.probes);
            if page.next_page_token.is_empty() {
                return Ok(all);
            }
            request.page_token = page.next_page_token;
        }
    }
}

/// Where the server is, as given or by default.
pub(crate) fn socket_path(server: &ServerAt) -> PathBuf {
    server.socket.clone().unwrap_or_else(|| {
        let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
        folder
            .as_deref()
            .map_or(Path::new("/run"), Path::new)
            .join("hvprobe.sock")
    })
}

/// The ids of the probes that `chosen` names, by number or by name.
pub(crate) fn choose(probes: &[v1::Probe], chosen: &[String]) -> anyhow::Result<Vec<u32>> {
    let mut ids = Vec::with_capacity(chosen.len());
    for wanted in chosen {
        let by_id = wanted
            .parse::<u32>()
            .ok()
            .and_then(|id| probes.iter().find(|probe| probe.id == id));
        let mut named = probes.iter().filter(|probe| probe.name == *wanted);
        let id = match (by_id, named.next(), named.next()) {
            (Some(probe), _, _) | (None, Some(probe), None) => probe.id,
            (None, Some(_), Some(_)) => {
                bail!("several probes are called {wanted}; give their numbers instead")
            }
            (None, None, _) => bail!("there is no probe {wanted}; `hvprobe probe list` shows them"),
        };
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probes() -> Vec<v1::Probe> {
        [(1, "a"), (2, "b"), (3, "b")]
            .map(|(id, name)| v1::Probe {
                id,
                name: name.into(),
                ..Default::default()
            })
            .into()
    }

    fn chosen(words: &[&str]) -> Result<Vec<u32>, String> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        choose(&probes(), &words).map_err(|error| error.to_string())
    }

    #[test]
    fn probes_are_chosen_once_by_number_or_name() {
        assert_eq!(chosen(&["3", "a", "1"]), Ok(vec![3, 1]));
        assert_eq!(chosen(&[]), Ok(vec![]));
    }

    #[test]
    fn unknown_and_ambiguous_names_are_refused() {
        assert!(chosen(&["b"]).unwrap_err().contains("several"));
        assert!(chosen(&["7"]).unwrap_err().contains("no probe 7"));
    }
}
