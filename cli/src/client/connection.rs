//! Connection to a server, with a client of each service.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, anyhow, bail};
use hvprobe_proto::{Token, roomy};
use hvprobe_proto::v1::decisions_client::DecisionsClient;
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::histograms_client::HistogramsClient;
use hvprobe_proto::v1::host_client::HostClient;
use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::probes_client::ProbesClient;
use hvprobe_proto::v1::sessions_client::SessionsClient;
use hvprobe_proto::v1::sources_client::SourcesClient;
use hvprobe_proto::v1::symbols_client::SymbolsClient;
use hvprobe_proto::v1::{
    self, ConsoleOutput, ConsoleRequest, GetMachineRequest, ListMachinesRequest, ListProbesRequest,
    MachineState,
};
use hyper_util::rt::TokioIo;
use prost_types::FieldMask;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Endpoint, Uri};
use tonic::{Request, Status, Streaming};

use super::versions::Explained;
use crate::failure::{Refused, WrongUsage};
use crate::options::server::{OnMachine, ServerAt, SocketAt};
use crate::output::values::source_lines::Lines;

/// Maximum size in bytes of a list of probes: enough for all probes that a machine can reasonably have, with
/// their actions.
const LISTS: usize = 256 << 20;

/// Transport under the gRPC clients.
pub(crate) type Calls = InterceptedService<Explained, Shown>;

/// Token that is sent with each call, if the server needs one.
#[derive(Clone, Debug)]
pub(crate) struct Shown(Option<MetadataValue<Ascii>>);

impl Shown {
    fn new(token: Option<&Token>) -> anyhow::Result<Self> {
        let Some(token) = token else {
            return Ok(Self(None));
        };
        let mut shown: MetadataValue<Ascii> = token.bearer().parse()?;
        // Logs of requests leave it out.
        shown.set_sensitive(true);
        Ok(Self(Some(shown)))
    }
}

impl Interceptor for Shown {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(shown) = &self.0 {
            let metadata = request.metadata_mut();
            metadata.insert("authorization", shown.clone());
        }
        Ok(request)
    }
}

/// Returns the error for a failed connection to `place`; `start` is the command that starts a server there.
fn absent(place: impl fmt::Display, start: &str, error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            anyhow!("no server listens on {place}; start one with `{start}`")
        }
        _ => anyhow::Error::from(error).context(format!("cannot connect to {place}")),
    }
}

/// Returns whether the user `own` may trust a server of the user `server`. Users trust their own servers and
/// root's. Root may use any server, which accepts root's connections.
fn is_trusted(server: u32, own: u32) -> bool {
    server == own || server == 0 || own == 0
}

/// A connection to a server.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) machines: MachinesClient<Calls>,
    pub(crate) probes: ProbesClient<Calls>,
    pub(crate) events: EventsClient<Calls>,
    pub(crate) decisions: DecisionsClient<Calls>,
    pub(crate) sources: SourcesClient<Calls>,
    pub(crate) symbols: SymbolsClient<Calls>,
    pub(crate) host: HostClient<Calls>,
    pub(crate) histograms: HistogramsClient<Calls>,
    pub(crate) sessions: SessionsClient<Calls>,
    /// Source lines of a machine's kernel and modules, if they are known on the client's side.
    pub(crate) lines: Option<Arc<Lines>>,
}

impl Client {
    /// Connects to the server at `server`.
    pub(crate) async fn connect(server: &ServerAt) -> anyhow::Result<Self> {
        match (server.connect, &server.token_file) {
            (Some(url), Some(file)) => {
                // Reads the token before the server sees a connection.
                let token = Token::read(file)?;
                let stream = TcpStream::connect(url.0).await.map_err(|error| {
                    let (address, token) = (url.0, file.display());
                    let start = format!("hvprobe serve --listen {address} --token-file {token}");
                    absent(url, &start, error)
                })?;
                stream.set_nodelay(true)?;
                Self::over(stream, Some(&token)).await
            }
            _ => {
                let path = socket_path(&server.at);
                let stream = UnixStream::connect(&path)
                    .await
                    .map_err(|error| absent(path.display(), "hvprobe serve", error))?;
                let (server, own) = (stream.peer_cred()?.uid(), geteuid().as_raw());
                if !is_trusted(server, own) {
                    bail!(
                        "what listens on {} is user {server}'s, neither yours nor root's, and is not believed: call it as that user, or \
                         over TCP with its token (--connect)",
                        path.display()
                    );
                }
                Self::over(stream, None).await
            }
        }
    }

    /// Talks to a server over `stream`, and shows it the token with each call.
    pub(crate) async fn over(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        token: Option<&Token>,
    ) -> anyhow::Result<Self> {
        let mut stream = Some(TokioIo::new(stream));
        // The connector has one stream; a lost connection is not made again.
        let connector = tower::service_fn(move |_: Uri| {
            let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
            async move { stream.map_err(io::Error::from) }
        });
        let channel = roomy(Endpoint::from_static("http://hvprobe"))
            .connect_with_connector(connector)
            .await
            .context("the server does not speak gRPC")?;
        let calls = InterceptedService::new(Explained(channel), Shown::new(token)?);
        Ok(Self {
            machines: MachinesClient::new(calls.clone()).max_decoding_message_size(LISTS),
            probes: ProbesClient::new(calls.clone()).max_decoding_message_size(LISTS),
            events: EventsClient::new(calls.clone()),
            decisions: DecisionsClient::new(calls.clone()),
            sources: SourcesClient::new(calls.clone()),
            symbols: SymbolsClient::new(calls.clone()),
            host: HostClient::new(calls.clone()),
            histograms: HistogramsClient::new(calls.clone()),
            sessions: SessionsClient::new(calls),
            lines: None,
        })
    }

    /// Connects to the server and finds the machine that `on` names.
    pub(crate) async fn on_machine(on: &OnMachine) -> anyhow::Result<(Self, String)> {
        let mut client = Self::connect(&on.server).await?;
        let machine = client.machine(on.vm.as_deref()).await?;
        Ok((client, machine))
    }

    /// Returns the machine of that name; without a name, the only one that is not stopped.
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
        let answer = self.machines.get_machine(GetMachineRequest { machine });
        Ok(answer.await.map_err(Refused::from)?.into_inner())
    }

    /// Streams the output of the console of `machine`, or only the part that the server keeps.
    pub(crate) async fn console(
        &mut self,
        machine: String,
        kept_only: bool,
    ) -> Result<Streaming<ConsoleOutput>, Refused> {
        let request = ConsoleRequest { machine, kept_only };
        let answer = self.machines.console(request).await;
        Ok(answer.map_err(Refused::from)?.into_inner())
    }

    /// Lists all machines that match `request`, page by page.
    pub(crate) async fn list_machines(
        &mut self,
        mut request: ListMachinesRequest,
    ) -> anyhow::Result<Vec<v1::Machine>> {
        let mut all = Vec::new();
        loop {
            let answer = self.machines.list_machines(request.clone()).await;
            let page = answer.map_err(Refused::from)?.into_inner();
            all.extend(page.machines);
            if page.next_page_token.is_empty() {
                return Ok(all);
            }
            request.page_token = page.next_page_token;
        }
    }

    /// Lists the probes of `machine`.
    pub(crate) async fn list_probes(&mut self, machine: &str) -> anyhow::Result<Vec<v1::Probe>> {
        self.list_probes_of(machine, "").await
    }

    /// Lists the probes that leave with the clients called `owner`, or all probes if `owner` is empty.
    pub(crate) async fn list_probes_of(
        &mut self,
        machine: &str,
        owner: &str,
    ) -> anyhow::Result<Vec<v1::Probe>> {
        let mut all = Vec::new();
        let mut request = ListProbesRequest {
            machine: machine.to_owned(),
            owner: owner.to_owned(),
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
    fn servers_of_other_users_are_believed_by_root_only() {
        for (server, own, trusted) in [(7, 7, true), (0, 7, true), (8, 7, false), (7, 0, true)] {
            assert_eq!(is_trusted(server, own), trusted, "{server}, {own}");
        }
    }
}
