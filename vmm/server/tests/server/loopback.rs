//! Calls over a TCP port: each call of any method needs the token.

use std::time::Duration;

use hvprobe_proto::v1::machines_client::MachinesClient;
use hvprobe_proto::v1::{ErrorDetail, ErrorKind, ListMachinesRequest};
use hvprobe_proto::{FILE_DESCRIPTOR_SET, Token};
use hvprobe_server::{Limits, Listener, Loopback, Server};
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// Methods of the server that are not in `hvprobe.v1`, and paths that do not exist.
const OTHERS: [&str; 6] = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such.Service/Call",
    "/",
];

/// Returns the paths of all methods.
fn all() -> Vec<String> {
    let files = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    let ours = files.file.iter().flat_map(|file| {
        file.service.iter().flat_map(|service| {
            let name = format!("/{}.{}/", file.package(), service.name());
            service
                .method
                .iter()
                .map(move |method| format!("{name}{}", method.name()))
        })
    });
    ours.chain(OTHERS.map(str::to_owned)).collect()
}

/// Calls `path` with an empty message, and returns the status of the answer.
async fn call(channel: &Channel, path: &str, shown: Option<&str>) -> Result<(), Status> {
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let mut request = Request::new(());
    if let Some(shown) = shown {
        let metadata = request.metadata_mut();
        metadata.insert("authorization", shown.parse().unwrap());
    }
    let path = PathAndQuery::try_from(path).unwrap();
    let codec = ProstCodec::<(), ()>::default();
    client.unary(request, path, codec).await.map(drop)
}

fn kind(status: &Status) -> ErrorKind {
    let packed = tonic_types::Status::decode(status.details()).unwrap();
    let detail = ErrorDetail::decode(packed.details[0].value.as_slice()).unwrap();
    detail.kind()
}

#[tokio::test]
async fn tcp_connections_beyond_those_that_may_be_are_refused_and_the_socket_is_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, file) = (folder.path().join("socket"), folder.path().join("token"));
    let token = Token::read_or_create(&file).unwrap();
    let right = token.bearer();
    let address = "127.0.0.1:0".parse().unwrap();
    let loopback = Loopback::bind(address, token).await.unwrap();
    let url = format!("http://{}", loopback.address());
    let mut server = Server::new().with_limits(Limits {
        tcp_connections: 1,
        ..Limits::of_host()
    });
    server.listen_too(loopback);
    let listener = Listener::bind(&socket).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let served = tokio::spawn(server.serve(listener, async {
        let _asked_or_dropped = stopped.await;
    }));

    let tested = async {
        let connect = async || {
            let endpoint = Endpoint::try_from(url.clone()).unwrap();
            endpoint.connect().await.unwrap()
        };
        let health = async |channel: &Channel| call(channel, OTHERS[0], Some(&right)).await;
        let only = connect().await;
        health(&only).await.unwrap();
        let other = connect().await;
        let refused = health(&other).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
        assert_eq!(kind(&refused), ErrorKind::TooManyConnections);
        let expected = "all 1 connections to the TCP port of this server";
        assert!(refused.message().contains(expected), "{refused:?}");
        let unix = Endpoint::try_from(format!("unix:{}", socket.display()));
        let unix = unix.unwrap().connect().await.unwrap();
        call(&unix, OTHERS[0], None).await.unwrap();
        health(&only).await.unwrap();
        drop((only, other));
        while health(&connect().await).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    let tested = timeout(Duration::from_secs(60), tested).await;
    tested.expect("every call is answered");
    drop(stop);
    served.await.unwrap().unwrap();
}

#[tokio::test]
async fn every_call_over_tcp_needs_the_token_and_none_over_the_socket_does() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, file) = (folder.path().join("socket"), folder.path().join("token"));
    let token = Token::read_or_create(&file).unwrap();
    let right = token.bearer();
    let address = "127.0.0.1:0".parse().unwrap();
    let loopback = Loopback::bind(address, token).await.unwrap();
    let url = format!("http://{}", loopback.address());
    let mut server = Server::new();
    server.listen_too(loopback);
    let listener = Listener::bind(&socket).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let served = tokio::spawn(server.serve(listener, async {
        let _asked_or_dropped = stopped.await;
    }));

    let tested = async {
        let tcp = Endpoint::try_from(url).unwrap().connect().await.unwrap();
        for path in all() {
            for shown in [None, Some("Bearer 0123456789abcdef"), Some("Basic eA==")] {
                let refused = call(&tcp, &path, shown).await.unwrap_err();
                assert_eq!(refused.code(), Code::Unauthenticated, "{path}: {refused:?}");
                assert_eq!(kind(&refused), ErrorKind::Unauthenticated);
            }
        }
        let unix = Endpoint::try_from(format!("unix:{}", socket.display()));
        let unix = unix.unwrap().connect().await.unwrap();
        for (channel, shown) in [(&tcp, Some(right.as_str())), (&unix, None)] {
            let health = call(channel, OTHERS[0], shown).await;
            assert!(health.is_ok(), "{health:?}");
            let unknown = call(channel, OTHERS[4], shown).await.unwrap_err();
            assert_eq!(unknown.code(), Code::Unimplemented, "{unknown:?}");
        }
        let mut machines = MachinesClient::with_interceptor(tcp, |mut call: Request<()>| {
            let metadata = call.metadata_mut();
            metadata.insert("authorization", right.parse().unwrap());
            Ok(call)
        });
        let list = machines
            .list_machines(ListMachinesRequest::default())
            .await
            .unwrap();
        assert!(list.into_inner().machines.is_empty());
    };
    let tested = timeout(Duration::from_secs(60), tested).await;
    tested.expect("every call is answered");
    stop.send(()).unwrap();
    let ended = timeout(Duration::from_secs(30), served).await;
    ended.expect("the server ends").unwrap().unwrap();
}
