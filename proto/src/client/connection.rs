//! Connections to servers.
//!
//! Invariants: a client uses a server on a unix socket only if the server runs as the client's user or as root, or
//! if the client runs as root; the token is sent with each call, and is never logged; a lost connection is not
//! restored.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use prost::Message as _;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tonic::metadata::errors::InvalidMetadataValue;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{self, Endpoint, Uri};
use tonic::{Request, Status, Streaming};

use super::pages::{LIST, Pages};
use super::versions::ExplainingChannel;
use crate::endpoint::roomy;
use crate::token::Token;
use crate::v1::decisions_client::DecisionsClient;
use crate::v1::events_client::EventsClient;
use crate::v1::histograms_client::HistogramsClient;
use crate::v1::host_client::HostClient;
use crate::v1::machines_client::MachinesClient;
use crate::v1::probes_client::ProbesClient;
use crate::v1::sessions_client::SessionsClient;
use crate::v1::sources_client::SourcesClient;
use crate::v1::symbols_client::SymbolsClient;
use crate::v1::{
    self, ConsoleOutput, ConsoleRequest, GetMachineRequest, ListMachinesRequest, ListProbesRequest,
};

/// Transport under the gRPC clients.
pub type Calls = InterceptedService<ExplainingChannel, TokenInterceptor>;

/// Sends a token with each call, if the server needs one.
#[derive(Clone, Debug)]
pub struct TokenInterceptor(Option<MetadataValue<Ascii>>);

impl TokenInterceptor {
    fn new(token: Option<&Token>) -> Result<Self, InvalidMetadataValue> {
        let Some(token) = token else {
            return Ok(Self(None));
        };
        let mut shown: MetadataValue<Ascii> = token.bearer().parse()?;
        // Logs of requests omit a sensitive value.
        shown.set_sensitive(true);
        Ok(Self(Some(shown)))
    }
}

impl Interceptor for TokenInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(shown) = &self.0 {
            let metadata = request.metadata_mut();
            metadata.insert("authorization", shown.clone());
        }
        Ok(request)
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No server listens on this path or URL.
    #[error("no server listens on {0}")]
    NoServer(
        /// Path or URL of the server.
        String,
    ),
    /// The system refused.
    #[error("cannot connect to {place}")]
    Io {
        /// Path or URL of the server.
        place: String,
        /// Error of the system.
        source: io::Error,
    },
    /// The server runs as another user, who could read and forge everything.
    #[error(
        "what listens on {} is user {user}'s, neither yours nor root's, and is not believed",
        path.display()
    )]
    Untrusted {
        /// The socket.
        path: PathBuf,
        /// User who listens on it.
        user: u32,
    },
    /// The token cannot be sent.
    #[error("the token cannot be sent")]
    Token(#[from] InvalidMetadataValue),
    /// The peer does not speak gRPC.
    #[error("the server does not speak gRPC")]
    NotGrpc(#[source] transport::Error),
}

/// Returns a function that converts an I/O error of the connection to `place` to a [`ConnectError`].
fn failed(place: impl fmt::Display) -> impl FnOnce(io::Error) -> ConnectError {
    move |source| {
        let place = place.to_string();
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ConnectError::NoServer(place)
            }
            _ => ConnectError::Io { place, source },
        }
    }
}

/// Returns whether the user `own` may trust a server of the user `server`. Users trust their own servers and
/// root's. Root may use any server, because servers accept root's connections.
fn is_trusted(server: u32, own: u32) -> bool {
    server == own || server == 0 || own == 0
}

/// A connection to a server: a client of each service.
#[derive(Clone, Debug)]
pub struct Client {
    /// Machines.
    pub machines: MachinesClient<Calls>,
    /// Probes.
    pub probes: ProbesClient<Calls>,
    /// Events of probes.
    pub events: EventsClient<Calls>,
    /// Decisions at hits.
    pub decisions: DecisionsClient<Calls>,
    /// Lines and variables of sources.
    pub sources: SourcesClient<Calls>,
    /// Symbols and types.
    pub symbols: SymbolsClient<Calls>,
    /// The server's host.
    pub host: HostClient<Calls>,
    /// Histograms.
    pub histograms: HistogramsClient<Calls>,
    /// Sessions.
    pub sessions: SessionsClient<Calls>,
}

impl Client {
    /// Connects to the server on the TCP port at `address`, and sends it `token` with each call.
    ///
    /// # Errors
    /// When no server is there.
    pub async fn tcp(address: SocketAddr, token: &Token) -> Result<Self, ConnectError> {
        let failed = || failed(format!("http://{address}"));
        let stream = TcpStream::connect(address).await.map_err(failed())?;
        stream.set_nodelay(true).map_err(failed())?;
        Self::over(stream, Some(token)).await
    }

    /// Connects to the server on the unix socket at `path`.
    ///
    /// # Errors
    /// When no server is there, or it runs as a user who is not trusted.
    pub async fn unix(path: &Path) -> Result<Self, ConnectError> {
        let failed = || failed(path.display());
        let stream = UnixStream::connect(path).await.map_err(failed())?;
        let server = stream.peer_cred().map_err(failed())?.uid();
        if !is_trusted(server, geteuid().as_raw()) {
            return Err(ConnectError::Untrusted {
                path: path.to_owned(),
                user: server,
            });
        }
        Self::over(stream, None).await
    }

    /// Connects to the server at the other end of `stream`. Sends it the token, if there is one, with each call.
    ///
    /// # Errors
    /// When the peer does not speak gRPC, or the token cannot be sent.
    pub async fn over(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        token: Option<&Token>,
    ) -> Result<Self, ConnectError> {
        let mut stream = Some(TokioIo::new(stream));
        let connector = tower::service_fn(move |_: Uri| {
            let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
            async move { stream.map_err(io::Error::from) }
        });
        let channel = roomy(Endpoint::from_static("http://hvprobe"))
            .connect_with_connector(connector)
            .await
            .map_err(ConnectError::NotGrpc)?;
        let token = TokenInterceptor::new(token)?;
        let calls = InterceptedService::new(ExplainingChannel(channel), token);
        Ok(Self {
            machines: MachinesClient::new(calls.clone()).max_decoding_message_size(LIST),
            probes: ProbesClient::new(calls.clone()).max_decoding_message_size(LIST),
            events: EventsClient::new(calls.clone()),
            decisions: DecisionsClient::new(calls.clone()),
            sources: SourcesClient::new(calls.clone()),
            symbols: SymbolsClient::new(calls.clone()),
            host: HostClient::new(calls.clone()),
            histograms: HistogramsClient::new(calls.clone()),
            sessions: SessionsClient::new(calls),
        })
    }

    /// Asks the server to describe `machine`.
    ///
    /// # Errors
    /// The server's error.
    pub async fn get_machine(&mut self, machine: String) -> Result<v1::Machine, Status> {
        let answer = self.machines.get_machine(GetMachineRequest { machine });
        Ok(answer.await?.into_inner())
    }

    /// Streams the console output of `machine`: the output that the server has kept and then, unless `kept_only` is
    /// set, new output.
    ///
    /// # Errors
    /// The server's error.
    pub async fn console(
        &mut self,
        machine: String,
        kept_only: bool,
    ) -> Result<Streaming<ConsoleOutput>, Status> {
        let request = ConsoleRequest { machine, kept_only };
        Ok(self.machines.console(request).await?.into_inner())
    }

    /// Lists all machines that match `request`, page by page.
    ///
    /// # Errors
    /// The server's error, or an error if its pages do not end.
    pub async fn list_machines(
        &mut self,
        mut request: ListMachinesRequest,
    ) -> Result<Vec<v1::Machine>, Status> {
        let (mut all, mut pages) = (Vec::new(), Pages::default());
        loop {
            let answer = self.machines.list_machines(request.clone()).await;
            let page = answer?.into_inner();
            let bytes = page.encoded_len();
            all.extend(page.machines);
            match pages.after(bytes, page.next_page_token)? {
                Some(token) => request.page_token = token,
                None => return Ok(all),
            }
        }
    }

    /// Lists the probes of `machine` that belong to sessions with this `owner`, or all its probes if `owner` is
    /// empty. Reads the list page by page.
    ///
    /// # Errors
    /// The server's error, or an error if its pages do not end.
    pub async fn list_probes(
        &mut self,
        machine: &str,
        owner: &str,
    ) -> Result<Vec<v1::Probe>, Status> {
        let (mut all, mut pages) = (Vec::new(), Pages::default());
        let mut request = ListProbesRequest {
            machine: machine.to_owned(),
            owner: owner.to_owned(),
            ..Default::default()
        };
        loop {
            let answer = self.probes.list_probes(request.clone()).await;
            let page = answer?.into_inner();
            let bytes = page.encoded_len();
            all.extend(page.probes);
            match pages.after(bytes, page.next_page_token)? {
                Some(token) => request.page_token = token,
                None => return Ok(all),
            }
        }
    }
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
