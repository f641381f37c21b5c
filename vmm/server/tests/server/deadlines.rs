//! Streams whose deadlines have passed: each ends with an error, and returns its permit.

use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::sessions_client::SessionsClient;
use hvprobe_proto::v1::{
    HoldRequest, ListSessionsRequest, OpenSession, WatchMachinesRequest, hold_request,
};
use hvprobe_server::{Limits, Server};
use tokio::time::timeout;
use tonic::{Code, Request, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_types::StatusExt as _;

use crate::bounds::{PATIENCE, Running};

/// Returns a request with `message` and a deadline of three seconds: enough for each call to begin on a slow
/// machine.
fn within_seconds<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    // As `Request::set_timeout` does. The library's client checks it only until an answer begins.
    let metadata = request.metadata_mut();
    metadata.insert("grpc-timeout", "3S".parse().unwrap());
    request
}

/// Returns the status that a stream ends with. Skips the messages before it.
async fn end<T>(mut stream: Streaming<T>) -> Status {
    let end = async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended as if that had been all"),
                Err(status) => return status,
            }
        }
    };
    timeout(PATIENCE, end).await.expect("it ends")
}

#[tokio::test]
async fn streams_of_all_services_end_with_their_deadlines_and_leave_their_places() {
    // Each stream needs the permit of the previous one.
    let running = Running::start(Server::new().with_limits(Limits {
        streams: 1,
        ..Limits::of_host()
    }));
    let channel = running.connect().await;
    let over = |status: &Status| {
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        let info = status.get_details_error_info().unwrap();
        assert_eq!(info.reason, "DEADLINE_EXCEEDED");
    };

    let mut machines = MachinesClient::new(channel.clone());
    let request = within_seconds(WatchMachinesRequest::default());
    let stream = machines.watch_machines(request).await.unwrap();
    over(&end(stream.into_inner()).await);

    let mut health = HealthClient::new(channel.clone());
    let request = within_seconds(HealthCheckRequest::default());
    over(&end(health.watch(request).await.unwrap().into_inner()).await);

    let mut reflection = ServerReflectionClient::new(channel.clone());
    let request = within_seconds(tokio_stream::pending::<ServerReflectionRequest>());
    let stream = reflection.server_reflection_info(request).await.unwrap();
    over(&end(stream.into_inner()).await);

    let mut sessions = SessionsClient::new(channel.clone());
    let open = OpenSession {
        owner: "me".to_owned(),
        ttl_ms: 3_600_000,
        ..Default::default()
    };
    let what = Some(hold_request::What::Open(open));
    let (to_server, messages) = tokio::sync::mpsc::channel(1);
    to_server.send(HoldRequest { what }).await.unwrap();
    let messages = tokio_stream::wrappers::ReceiverStream::new(messages);
    let stream = sessions.hold(within_seconds(messages)).await.unwrap();
    over(&end(stream.into_inner()).await);
    // The task that holds the session has noticed the end.
    let is_over = async {
        let mut list = async || sessions.list_sessions(ListSessionsRequest::default()).await;
        while !list().await.unwrap().into_inner().sessions.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, is_over).await.expect("the session ends");

    let request = within_seconds(WatchMachinesRequest::default());
    assert!(machines.watch_machines(request).await.is_ok());
    running.stop().await;
}
