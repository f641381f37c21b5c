//! Streams of events as clients see them: filters, positions to continue from, deadlines.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hvprobe_arch::Regs;
use hvprobe_hit::event::{Captured, Event, EventKind, Sink};
use hvprobe_linux::task::Task;
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::{ErrorDetail, ErrorKind, Position, SubscribeRequest, SubscribeResponse};
use hvprobe_server::{Limits, Listener, ServeError, Server};
use hvprobe_spec::{ProbeId, RegisterSet};
use prost::Message as _;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status, Streaming};

/// Time limit for everything that is waited for.
const LONG: Duration = Duration::from_secs(60);

/// A server with a stream of synthetic events.
struct Made {
    _folder: tempfile::TempDir,
    socket: PathBuf,
    sink: Sink,
    next: u64,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), ServeError>>,
}

impl Made {
    fn start() -> Self {
        Self::with_limits(Limits::of_host())
    }

    fn with_limits(limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let mut server = Server::new().with_limits(limits);
        let sink = server.publish("synthetic");
        let listener = Listener::bind(&socket).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(server.serve(listener, async {
            let _asked_or_dropped = stopped.await;
        }));
        Self {
            _folder: folder,
            socket,
            sink,
            next: 0,
            stop,
            serving,
        }
    }

    /// Makes `count` events; every second one is of task 1.
    fn make(&mut self, count: u64) {
        let events: Vec<_> = (self.next..self.next + count).map(event).collect();
        self.next += count;
        (self.sink)(&events, 0);
    }

    async fn stop(self) {
        drop((self.sink, self.stop));
        let served = tokio::time::timeout(LONG, self.serving).await;
        served.expect("the server goes on").unwrap().unwrap();
    }
}

fn event(seq: u64) -> Event {
    let pid = i32::from(seq % 2 == 1);
    Event {
        kind: EventKind::Hit,
        seq,
        probe: ProbeId(1),
        vcpu: 0,
        host_ns: seq,
        guest_tsc: 0,
        regs: Regs::default(),
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: Some(Task {
            pid,
            tgid: pid,
            comm: *b"worker\0\0\0\0\0\0\0\0\0\0",
        }),
        cost_ns: 0,
    }
}

async fn subscribe(
    socket: &Path,
    request: impl tonic::IntoRequest<SubscribeRequest>,
) -> Result<Streaming<SubscribeResponse>, Status> {
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let stream = EventsClient::new(channel).subscribe(request).await?;
    Ok(stream.into_inner())
}

fn request() -> SubscribeRequest {
    SubscribeRequest {
        machine: "synthetic".to_owned(),
        ..Default::default()
    }
}

async fn next(stream: &mut Streaming<SubscribeResponse>) -> SubscribeResponse {
    let message = tokio::time::timeout(LONG, stream.message()).await;
    message.expect("no message came").unwrap().unwrap()
}

/// Returns the numbers of the next `count` events, and the position of the stream after them.
async fn numbers(
    stream: &mut Streaming<SubscribeResponse>,
    count: usize,
) -> (Vec<u64>, Option<Position>) {
    let (mut numbers, mut position) = (Vec::new(), None);
    while numbers.len() < count {
        let message = next(stream).await;
        assert_eq!((message.dropped, message.missed), (0, 0));
        numbers.extend(message.events.iter().map(|event| event.seq));
        position = message.position;
    }
    (numbers, position)
}

fn kind(status: &Status) -> ErrorKind {
    let packed = tonic_types::Status::decode(status.details()).unwrap();
    let detail = ErrorDetail::decode(packed.details[0].value.as_slice()).unwrap();
    detail.kind()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_connects_again_goes_on_where_it_was_behind_its_filter() {
    let mut made = Made::start();
    let wanted = SubscribeRequest {
        filter: "pid == 1 && comm ~ \"work*\"".to_owned(),
        ..request()
    };
    let mut first = subscribe(&made.socket, wanted.clone()).await.unwrap();
    assert_eq!(next(&mut first).await.position, Some(Position::default()));
    made.make(10);
    let (seen, position) = numbers(&mut first, 5).await;
    assert_eq!(seen, [1, 3, 5, 7, 9]);
    assert_eq!(position.as_ref().map(|at| at.seq), Some(10));
    drop(first);
    made.make(6);
    let after = SubscribeRequest {
        after: position,
        ..wanted
    };
    let mut second = subscribe(&made.socket, after).await.unwrap();
    assert_eq!(next(&mut second).await.missed, 0);
    made.make(2);
    assert_eq!(numbers(&mut second, 4).await.0, [11, 13, 15, 17]);
    drop(second);
    made.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn positions_that_cannot_be_and_filters_that_cannot_be_read_are_refused() {
    let made = Made::start();
    let at = |machine_uid: &str, seq| SubscribeRequest {
        after: Some(Position {
            machine_uid: machine_uid.to_owned(),
            seq,
            dropped: 0,
        }),
        ..request()
    };
    let refused = async |request| subscribe(&made.socket, request).await.unwrap_err();
    let other = refused(at("another", 0)).await;
    assert_eq!(other.code(), Code::FailedPrecondition);
    assert_eq!(kind(&other), ErrorKind::OtherMachine);
    let beyond = refused(at("", 1)).await;
    assert_eq!(beyond.code(), Code::InvalidArgument);
    assert_eq!(kind(&beyond), ErrorKind::BadPosition);
    let nameless = SubscribeRequest {
        machine: String::new(),
        ..at("", 0)
    };
    assert_eq!(refused(nameless).await.code(), Code::InvalidArgument);
    let filter = SubscribeRequest {
        filter: "pid ==".to_owned(),
        ..request()
    };
    assert_eq!(kind(&refused(filter).await), ErrorKind::Filter);
    made.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_beyond_what_may_wait_for_all_subscribers_are_dropped_counted_and_reported() {
    /// Far more than may wait for all subscribers, and less than may wait for each of them.
    const EVENTS: u64 = 28_000;
    const BATCH: u64 = 50;
    let mut made = Made::with_limits(Limits {
        event_bytes: 64 << 10,
        ..Limits::of_host()
    });
    let mut stuck = Vec::new();
    for _ in 0..2 {
        let mut stream = subscribe(&made.socket, request()).await.unwrap();
        next(&mut stream).await;
        stuck.push(stream);
    }
    for _ in 0..EVENTS / BATCH {
        made.make(BATCH);
    }
    // The streams end with the sink, once they have been read.
    let Made {
        _folder,
        sink,
        stop,
        serving,
        ..
    } = made;
    drop(sink);
    for mut stream in stuck {
        let (mut came, mut lost) = (0, 0);
        let all = async {
            while let Some(message) = stream.message().await.unwrap() {
                came += message.events.len() as u64;
                lost += message.dropped;
            }
        };
        tokio::time::timeout(LONG, all).await.expect("an end");
        assert_eq!(came + lost, EVENTS);
        assert!(came > 0 && lost > 0, "{came} came, {lost} were lost");
    }
    drop(stop);
    let served = tokio::time::timeout(LONG, serving).await;
    served.expect("the server goes on").unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_with_its_deadline() {
    let made = Made::start();
    let mut request = Request::new(request());
    // As `Request::set_timeout` does, but the client does not check the deadline itself.
    let metadata = request.metadata_mut();
    metadata.insert("grpc-timeout", "200m".parse().unwrap());
    let mut stream = subscribe(&made.socket, request).await.unwrap();
    next(&mut stream).await;
    let end = tokio::time::timeout(LONG, stream.message()).await;
    let end = end.expect("the stream goes on").unwrap_err();
    assert_eq!(end.code(), Code::DeadlineExceeded);
    made.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_all_machines_waits_for_those_that_come_and_ends_with_the_server() {
    let made = Made::start();
    let mut stream = subscribe(&made.socket, SubscribeRequest::default())
        .await
        .unwrap();
    let waiting = tokio::spawn(async move { stream.message().await });
    made.stop().await;
    let end = tokio::time::timeout(LONG, waiting).await;
    let end = end.expect("the stream goes on").unwrap();
    assert!(end.is_ok_and(|message| message.is_none()));
}
