//! A server on a socket of its own, and a client of that server.

use std::path::PathBuf;

use hvprobe_proto::v1::decisions_client::DecisionsClient;
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::histograms_client::HistogramsClient;
use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::probes_client::ProbesClient;
use hvprobe_proto::v1::sessions_client::SessionsClient;
use hvprobe_proto::v1::sources_client::SourcesClient;
use hvprobe_proto::v1::symbols_client::SymbolsClient;
use hvprobe_proto::v1::{
    BootRequest, ConsoleRequest, ErrorDetail, ListProbesRequest, Machine, MachineState, Probe,
    ProbeSpec, RegisterRequest, WatchRequest,
};
use hvprobe_server::{Listener, ServeError, Server};
use hvprobe_tests::rig::guest;
use prost::Message as _;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// Maximum number of pages of a list: more than any list here has. Each page has one probe.
const PAGES: usize = 1000;

/// A command that prints that it is ready, then exits with the status that it reads.
pub(crate) const OBEDIENT: &[&str] = &["sh", "-c", "echo ready; read status; exit $status"];

/// A server on a socket of its own.
pub(crate) struct Running {
    folder: TempDir,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ServeError>>,
}

impl Running {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("socket")).unwrap();
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(Server::new().serve(listener, async {
            stopped.await.unwrap();
        }));
        Self {
            folder,
            stop,
            served,
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) async fn client(&self) -> Client {
        let endpoint = Endpoint::try_from(format!("unix:{}", self.socket().display()));
        Client::over(endpoint.unwrap().connect().await.unwrap())
    }

    pub(crate) async fn stop(self) {
        let socket = self.socket();
        self.stop.send(()).unwrap();
        self.served.await.unwrap().unwrap();
        assert!(!socket.exists());
    }
}

#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) machines: MachinesClient<Channel>,
    pub(crate) probes: ProbesClient<Channel>,
    pub(crate) events: EventsClient<Channel>,
    pub(crate) histograms: HistogramsClient<Channel>,
    pub(crate) sources: SourcesClient<Channel>,
    pub(crate) symbols: SymbolsClient<Channel>,
    pub(crate) sessions: SessionsClient<Channel>,
    pub(crate) decisions: DecisionsClient<Channel>,
    pub(crate) channel: Channel,
}

impl Client {
    pub(crate) fn over(channel: Channel) -> Self {
        Self {
            machines: MachinesClient::new(channel.clone()),
            probes: ProbesClient::new(channel.clone()),
            events: EventsClient::new(channel.clone()),
            histograms: HistogramsClient::new(channel.clone()),
            sources: SourcesClient::new(channel.clone()),
            symbols: SymbolsClient::new(channel.clone()),
            sessions: SessionsClient::new(channel.clone()),
            decisions: DecisionsClient::new(channel.clone()),
            channel,
        }
    }

    pub(crate) async fn boot(&mut self, command: &[&str], probes: &[&str]) -> Machine {
        let request = request(command, probes);
        self.machines.boot(request).await.unwrap().into_inner()
    }

    /// Watches the machine until its kernel is up; returns the states seen.
    pub(crate) async fn wait_running(&mut self, machine: &str) -> Vec<MachineState> {
        let request = WatchRequest {
            machine: machine.into(),
        };
        let mut states = self.machines.watch(request).await.unwrap().into_inner();
        let mut seen = Vec::new();
        while let Some(machine) = states.message().await.unwrap() {
            seen.push(machine.state());
            if machine.state() != MachineState::Booting {
                break;
            }
        }
        assert_eq!(seen.last(), Some(&MachineState::Running), "{seen:?}");
        seen
    }

    pub(crate) async fn wait_printed(&mut self, machine: &str, text: &str) {
        let request = ConsoleRequest {
            machine: machine.into(),
            kept_only: false,
        };
        let mut output = self.machines.console(request).await.unwrap().into_inner();
        let mut printed = Vec::new();
        while !String::from_utf8_lossy(&printed).contains(text) {
            match output.message().await.unwrap() {
                Some(piece) => printed.extend(piece.data),
                None => panic!("never printed: {}", String::from_utf8_lossy(&printed)),
            }
        }
    }

    pub(crate) async fn register(
        &mut self,
        machine: &str,
        definitions: &[&str],
    ) -> Result<Vec<u32>, Status> {
        let request = RegisterRequest {
            machine: machine.into(),
            probes: specs(definitions),
            ..Default::default()
        };
        Ok(self.probes.register(request).await?.into_inner().ids)
    }

    pub(crate) async fn list(&mut self, machine: &str) -> Vec<Probe> {
        let mut all = Vec::new();
        let mut request = ListProbesRequest {
            machine: machine.into(),
            page_size: 1,
            ..Default::default()
        };
        for _ in 0..PAGES {
            let answer = self.probes.list_probes(request.clone()).await.unwrap();
            let page = answer.into_inner();
            assert!(page.probes.len() <= 1);
            all.extend(page.probes);
            if page.next_page_token.is_empty() {
                return all;
            }
            request.page_token = page.next_page_token;
        }
        panic!("more than {PAGES} pages of probes: {all:?}")
    }
}

pub(crate) fn request(command: &[&str], probes: &[&str]) -> BootRequest {
    let guest = guest(1, command);
    let text = |path: PathBuf| path.into_os_string().into_string().unwrap();
    BootRequest {
        name: String::new(),
        kernel: text(guest.kernel),
        initrd: guest.initrd.map(text).unwrap_or_default(),
        cmdline: guest.cmdline,
        cpus: guest.cpus,
        memory: guest.memory,
        command: guest.command,
        probes: specs(probes),
        skip_refused: false,
        ..Default::default()
    }
}

pub(crate) fn specs(definitions: &[&str]) -> Vec<ProbeSpec> {
    let spec = |definition: &&str| ProbeSpec {
        definition: (*definition).into(),
        ..Default::default()
    };
    definitions.iter().map(spec).collect()
}

/// Returns the machine-readable detail of an error.
pub(crate) fn detail(status: &Status) -> ErrorDetail {
    let packed = tonic_types::Status::decode(status.details()).unwrap();
    ErrorDetail::decode(packed.details[0].value.as_slice()).unwrap()
}
