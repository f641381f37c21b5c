//! A client that does not read costs a bounded amount of memory, and only that client loses events.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::path::Path;
use std::time::Duration;

use hvprobe_arch::Regs;
use hvprobe_hit::event::{Captured, Event, EventKind};
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::{SubscribeRequest, SubscribeResponse};
use hvprobe_server::{Listener, Server};
use hvprobe_spec::{ProbeId, RegisterSet};
use tokio::sync::oneshot;
use tonic::Streaming;
use tonic::transport::Endpoint;

/// Number of batches. Together they have ten million events.
const BATCHES: u64 = 10_000;
/// Number of events in a batch.
const BATCH: u64 = 1000;
/// Maximum memory that the events may take, in bytes; on the wire they have 2 GiB.
const MEMORY: u64 = 64 << 20;
/// Time limit for everything, on a busy machine.
const LONG: Duration = Duration::from_secs(300);

/// Makes a batch in which one event in a thousand is of probe 1, the others of probe 0.
fn batch() -> Vec<Event> {
    let event = |number| Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: ProbeId(u32::from(number == 0)),
        vcpu: 0,
        host_ns: number,
        guest_tsc: 0,
        regs: Regs::default(),
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: None,
        cost_ns: 0,
    };
    (0..BATCH).map(event).collect()
}

async fn subscribe(socket: &Path, probes: Vec<u32>) -> Streaming<SubscribeResponse> {
    let channel = Endpoint::from_shared(format!("unix:{}", socket.display()))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let request = SubscribeRequest {
        machine: "synthetic".to_owned(),
        probes,
        ..Default::default()
    };
    let mut stream = EventsClient::new(channel)
        .subscribe(request)
        .await
        .unwrap()
        .into_inner();
    // The first message confirms the subscription.
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!(first.machine, "synthetic");
    assert!(first.anchor.is_some_and(|anchor| anchor.realtime_ns > 0));
    stream
}

/// Returns the number of events that arrived, and of those that were lost.
async fn count(mut stream: Streaming<SubscribeResponse>) -> (u64, u64) {
    let (mut came, mut lost) = (0, 0);
    while let Some(message) = stream.message().await.unwrap() {
        came += message.events.len() as u64;
        lost += message.dropped;
    }
    (came, lost)
}

/// Returns the peak memory of this process in bytes (`VmHWM` of proc_pid_status(5)).
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.unwrap().split_whitespace().next().unwrap();
    kibibytes.parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_million_events_that_one_client_never_reads_are_counted_and_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut server = Server::new();
    let mut sink = server.publish("synthetic");
    let listener = Listener::bind(&socket).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(server.serve(listener, async {
        let _asked_or_dropped = stopped.await;
    }));

    let stuck = subscribe(&socket, Vec::new()).await;
    let quick = tokio::spawn(count(subscribe(&socket, vec![1]).await));
    let before = peak();
    let made = tokio::task::spawn_blocking(move || {
        let batch = batch();
        for _ in 0..BATCHES {
            sink(&batch, 0);
        }
        // The streams end with the sink.
    });
    made.await.unwrap();
    let quick = tokio::time::timeout(LONG, quick).await.unwrap().unwrap();
    assert_eq!(quick, (BATCHES, 0), "the other client lost events");
    let used = peak() - before;
    assert!(used < MEMORY, "{used} bytes for what nobody reads");

    let (came, lost) = tokio::time::timeout(LONG, count(stuck)).await.unwrap();
    assert_eq!(came + lost, BATCHES * BATCH);
    assert!(came > 0 && lost > came, "{came} came, {lost} were lost");
    drop(stop);
    serving.await.unwrap().unwrap();
}
