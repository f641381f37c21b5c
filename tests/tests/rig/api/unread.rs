//! Tests clients that request much and read nothing.

use std::time::Duration;

use hvprobe_proto::v1::{EndReason, ListMachinesRequest, ListSymbolsRequest, StopRequest};
use hvprobe_tests::rig::rig;
use tokio::time::timeout;

use super::client::Running;
use super::sessions::BUSY;
use super::used::threads;

/// Number of connections.
const CONNECTIONS: usize = 3;
/// Number of unread streams of each connection.
const STREAMS: usize = 233;
/// Permitted growth of the number of threads.
const MORE_THREADS: usize = 20;
/// Time limit of an answer to a client that reads.
const ANSWERED: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_streams_that_nobody_reads_keep_no_other_client_waiting() {
    if rig("api: unread streams").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let machine = client.boot(BUSY, &[]).await.name;
    let before = threads();
    let mut unread = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = server.client().await;
        for _ in 0..STREAMS {
            let request = ListSymbolsRequest {
                machine: machine.clone(),
                pattern: "*".into(),
                ..Default::default()
            };
            let stream = connection.symbols.list_symbols(request).await;
            unread.push(stream.unwrap().into_inner());
        }
    }
    let list = client
        .machines
        .list_machines(ListMachinesRequest::default());
    let list = timeout(ANSWERED, list).await.expect("an answer").unwrap();
    assert_eq!(list.into_inner().machines[0].name, machine);
    let now = threads();
    assert!(
        now < before + MORE_THREADS,
        "{now} threads, {before} before"
    );
    let stop = client.machines.stop(StopRequest { machine });
    let stopped = timeout(ANSWERED, stop).await.expect("an answer").unwrap();
    let ending = stopped.into_inner().ending.unwrap();
    assert_eq!(ending.reason(), EndReason::Stopped);
    // The streams were open all the time, with as much data as there was room for. The streams of a connection
    // share its window, so only the first of them is certain to have data.
    for stream in unread.iter_mut().step_by(STREAMS) {
        let first = timeout(ANSWERED, stream.message()).await.expect("a piece");
        assert!(!first.unwrap().unwrap().symbols.is_empty());
    }
    server.stop().await;
}
