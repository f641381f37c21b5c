//! Errors that clients get when a limit is reached, while everything else continues.

use std::path::PathBuf;
use std::time::Duration;

use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::sessions_client::SessionsClient;
use hvprobe_proto::v1::watch_machines_response::What;
use hvprobe_proto::v1::{
    BootRequest, ErrorDetail, ErrorKind, HoldRequest, ListMachinesRequest, OpenSession,
    SubscribeRequest, WatchMachinesRequest, hold_request,
};
use hvprobe_server::{Limits, Listener, ServeError, Server};
use prost::Message as _;
use tempfile::TempDir;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_types::StatusExt as _;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Running {
    folder: TempDir,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ServeError>>,
}

impl Running {
    pub(crate) fn start(server: Server) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("socket")).unwrap();
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(server.serve(listener, async {
            let _asked_or_dropped = stopped.await;
        }));
        Self {
            folder,
            stop,
            served,
        }
    }

    fn with_limits(limits: Limits) -> Self {
        Self::start(Server::new().with_limits(limits))
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) async fn connect(&self) -> Channel {
        let endpoint = Endpoint::try_from(format!("unix:{}", self.socket().display()));
        endpoint.unwrap().connect().await.unwrap()
    }

    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(PATIENCE, self.served)
            .await
            .expect("it ends")
            .unwrap()
            .unwrap();
    }
}

/// Returns the kind of an error. Checks that the error names `limit` as the limit that was reached.
fn kind(status: &Status, limit: &str) -> ErrorKind {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    let info = status.get_details_error_info().unwrap();
    assert_eq!(
        (info.domain.as_str(), info.metadata["limit"].as_str()),
        ("hvprobe", limit)
    );
    let packed = tonic_types::Status::decode(status.details()).unwrap();
    ErrorDetail::decode(packed.details[0].value.as_slice())
        .unwrap()
        .kind()
}

async fn list(channel: &Channel) -> Result<usize, Status> {
    let mut machines = MachinesClient::new(channel.clone());
    let answer = timeout(
        PATIENCE,
        machines.list_machines(ListMachinesRequest::default()),
    );
    Ok(answer
        .await
        .expect("an answer")?
        .into_inner()
        .machines
        .len())
}

#[tokio::test]
async fn connections_beyond_those_that_may_be_are_refused_until_one_ends() {
    let running = Running::with_limits(Limits {
        connections: 2,
        ..Limits::of_host()
    });
    let (one, other) = (running.connect().await, running.connect().await);
    for channel in [&one, &other] {
        assert_eq!(list(channel).await.unwrap(), 0);
    }
    let third = running.connect().await;
    let error = list(&third).await.unwrap_err();
    assert_eq!(kind(&error, "connections"), ErrorKind::TooManyConnections);
    assert!(error.message().contains("all 2 connections"), "{error}");
    assert_eq!(list(&one).await.unwrap(), 0);
    // Connections beyond those that are refused with an error wait, and are served when others are gone.
    drop((third, other));
    let again = async {
        while list(&running.connect().await).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, again).await.expect("there is room again");
    drop(one);
    running.stop().await;
}

#[tokio::test]
async fn streams_beyond_those_that_may_be_are_refused_and_other_calls_are_not() {
    let running = Running::with_limits(Limits {
        streams: 2,
        ..Limits::of_host()
    });
    let channel = running.connect().await;
    let watch = async || {
        let mut machines = MachinesClient::new(channel.clone());
        let mut stream = machines
            .watch_machines(WatchMachinesRequest::default())
            .await?
            .into_inner();
        let first = timeout(PATIENCE, stream.message())
            .await
            .expect("a message")?;
        assert!(matches!(first.unwrap().what, Some(What::AllTold(_))));
        Ok::<_, Status>(stream)
    };
    let (one, _other) = (watch().await.unwrap(), watch().await.unwrap());
    let error = watch().await.unwrap_err();
    assert_eq!(kind(&error, "streams"), ErrorKind::TooManyStreams);
    assert_eq!(list(&channel).await.unwrap(), 0);
    drop(one);
    let again = async {
        while watch().await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, again).await.expect("there is room again");
    running.stop().await;
}

#[tokio::test]
async fn watches_of_all_machines_end_with_the_server_and_not_with_an_error() {
    let running = Running::with_limits(Limits::of_host());
    let mut watched = Vec::new();
    for _ in 0..3 {
        let mut machines = MachinesClient::new(running.connect().await);
        let stream = machines.watch_machines(WatchMachinesRequest::default());
        let mut stream = stream.await.unwrap().into_inner();
        let first = timeout(PATIENCE, stream.message()).await;
        let first = first.expect("a message").unwrap().unwrap();
        assert!(matches!(first.what, Some(What::AllTold(_))));
        watched.push(stream);
    }
    running.stop().await;
    for mut stream in watched {
        let end = timeout(PATIENCE, stream.message()).await;
        assert_eq!(end.expect("an end").unwrap(), None);
    }
}

#[tokio::test]
async fn subscribers_beyond_those_that_may_be_are_refused() {
    let mut server = Server::new().with_limits(Limits {
        subscribers: 1,
        ..Limits::of_host()
    });
    let _sink = server.publish("synthetic");
    let running = Running::start(server);
    let channel = running.connect().await;
    let subscribe = async || {
        let mut events = EventsClient::new(channel.clone());
        let request = SubscribeRequest {
            machine: "synthetic".to_owned(),
            ..Default::default()
        };
        events.subscribe(request).await
    };
    let only = subscribe().await.unwrap();
    let error = subscribe().await.unwrap_err();
    assert_eq!(kind(&error, "subscribers"), ErrorKind::TooManySubscribers);
    drop(only);
    let again = async {
        while subscribe().await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, again).await.expect("there is room again");
    running.stop().await;
}

#[tokio::test]
async fn calls_beyond_those_that_one_connection_may_have_wait_and_those_of_others_do_not() {
    let running = Running::with_limits(Limits {
        calls_per_connection: 2,
        ..Limits::of_host()
    });
    let channel = running.connect().await;
    let mut watched = Vec::new();
    for _ in 0..2 {
        let mut machines = MachinesClient::new(channel.clone());
        let stream = machines.watch_machines(WatchMachinesRequest::default());
        let mut stream = stream.await.unwrap().into_inner();
        let first = timeout(PATIENCE, stream.message()).await;
        assert!(first.expect("a message").unwrap().is_some());
        watched.push(stream);
    }
    let third = tokio::spawn(async move { list(&channel).await });
    // Many other calls are answered while it waits.
    let other = running.connect().await;
    for _ in 0..100 {
        assert_eq!(list(&other).await.unwrap(), 0);
    }
    assert!(!third.is_finished());
    watched.pop();
    let listed = timeout(PATIENCE, third).await.expect("it goes on");
    assert_eq!(listed.unwrap().unwrap(), 0);
    running.stop().await;
}

#[tokio::test]
async fn sessions_beyond_those_that_may_be_are_refused() {
    let running = Running::with_limits(Limits {
        sessions: 1,
        ..Limits::of_host()
    });
    let channel = running.connect().await;
    let hold = async || {
        let mut sessions = SessionsClient::new(channel.clone());
        let open = OpenSession {
            owner: "me".to_owned(),
            ..Default::default()
        };
        let what = Some(hold_request::What::Open(open));
        // The stream stays open: the session ends with it.
        let (to_server, messages) = mpsc::channel(1);
        to_server.send(HoldRequest { what }).await.unwrap();
        let answers = sessions.hold(ReceiverStream::new(messages)).await?;
        Ok::<_, Status>((to_server, answers.into_inner()))
    };
    let only = hold().await.unwrap();
    let error = hold().await.unwrap_err();
    assert_eq!(kind(&error, "sessions"), ErrorKind::TooManySessions);
    assert!(error.message().contains("all 1 sessions"), "{error}");
    drop(only);
    let again = async {
        while hold().await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, again).await.expect("there is room again");
    running.stop().await;
}

#[tokio::test]
async fn guests_are_refused_before_their_files_are_looked_at() {
    let running = Running::with_limits(Limits {
        memory: 1 << 30,
        cpus: 4,
        ..Limits::of_host()
    });
    let channel = running.connect().await;
    let boot = async |memory, cpus| {
        let request = BootRequest {
            kernel: "/nowhere".to_owned(),
            memory,
            cpus,
            ..Default::default()
        };
        let mut machines = MachinesClient::new(channel.clone());
        machines.boot(request).await.unwrap_err()
    };
    let error = boot(2 << 30, 1).await;
    assert_eq!(kind(&error, "memory"), ErrorKind::TooMuchMemory);
    let bad = error.get_details_bad_request().unwrap();
    assert_eq!(bad.field_violations[0].field, "memory");
    assert_eq!(
        kind(&boot(1 << 30, 5).await, "cpus"),
        ErrorKind::TooManyCpus
    );
    // A boot that fails for another reason releases what it had taken.
    for _ in 0..3 {
        assert_eq!(boot(1 << 30, 4).await.code(), Code::InvalidArgument);
    }
    running.stop().await;
}

#[tokio::test]
async fn errors_about_the_longest_names_reach_their_clients() {
    let running = Running::with_limits(Limits::of_host());
    let channel = running.connect().await;
    let request = BootRequest {
        kernel: "ä".repeat(2047),
        memory: 1 << 30,
        ..Default::default()
    };
    let mut machines = MachinesClient::new(channel.clone());
    let error = machines.boot(request).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
    assert!(error.get_details_error_info().is_some(), "{error:?}");

    // The reflection service is not ours: it repeats a name that it does not know, and does not answer at all
    // if a question is too long.
    for (length, code) in [(900, Some(Code::NotFound)), (1 << 20, None)] {
        let asked = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::FileContainingSymbol("ä".repeat(length / 2))),
        };
        let mut reflection = ServerReflectionClient::new(channel.clone());
        let answers = reflection.server_reflection_info(tokio_stream::iter([asked]));
        let answer = answers.await.unwrap().into_inner().message().await;
        match code {
            Some(code) => assert_eq!(answer.unwrap_err().code(), code),
            None => assert_eq!(answer.unwrap(), None),
        }
    }
    running.stop().await;
}

#[tokio::test]
async fn health_is_what_it_is_for_each_service_until_the_server_stops() {
    let running = Running::start(Server::new());
    let channel = running.connect().await;
    let mut health = HealthClient::new(channel.clone());
    let services = [
        "",
        "hvprobe.v1.Machines",
        "hvprobe.v1.Probes",
        "hvprobe.v1.Events",
        "hvprobe.v1.Decisions",
        "hvprobe.v1.Histograms",
        "hvprobe.v1.Sources",
        "hvprobe.v1.Symbols",
        "hvprobe.v1.Host",
        "hvprobe.v1.Sessions",
    ];
    let mut watched = Vec::new();
    for service in services {
        let request = HealthCheckRequest {
            service: service.to_owned(),
        };
        let stream = health.watch(request).await.unwrap();
        watched.push(stream.into_inner());
    }
    let mut all_are = async |expected: ServingStatus| {
        for (service, stream) in services.iter().zip(&mut watched) {
            let response = timeout(PATIENCE, stream.message())
                .await
                .expect("an answer");
            assert_eq!(response.unwrap().unwrap().status(), expected, "{service:?}");
        }
    };
    all_are(ServingStatus::Serving).await;
    let unknown = HealthCheckRequest {
        service: "no.such.Service".to_owned(),
    };
    assert_eq!(
        health.check(unknown).await.unwrap_err().code(),
        Code::NotFound
    );
    running.stop.send(()).unwrap();
    all_are(ServingStatus::NotServing).await;
    timeout(PATIENCE, running.served)
        .await
        .expect("it ends")
        .unwrap()
        .unwrap();
}
