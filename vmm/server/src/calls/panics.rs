//! Containment of panics: a panic ends only the request that caused it. The client is sent an error; the panic
//! itself is printed.

use std::any::Any;
use std::future::Future;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Response;
use tower_http::catch_panic::CatchPanicLayer;

use crate::status::broken;

type Answer = fn(Box<dyn Any + Send>) -> Response<Body>;

/// Returns the layer that answers a request with an error if its handling panics.
pub(crate) fn layer() -> CatchPanicLayer<Answer> {
    CatchPanicLayer::custom((|_| broken("a request").into_http()) as Answer)
}

/// Creates a stream to a client with room for `room` messages. `work` gets the sender, and returns the future that
/// sends the messages.
pub(crate) fn stream<T: Send + 'static, F: Future<Output = ()> + Send + 'static>(
    room: usize,
    work: impl FnOnce(mpsc::Sender<Result<T, Status>>) -> F,
) -> ReceiverStream<Result<T, Status>> {
    let (to_client, messages) = mpsc::channel(room);
    spawn(to_client.clone(), work(to_client));
    ReceiverStream::new(messages)
}

/// Spawns `work`, which sends messages to `to_client`. If `work` panics, the stream of messages ends with an error.
pub(crate) fn spawn<T: Send + 'static>(
    to_client: mpsc::Sender<Result<T, Status>>,
    work: impl Future<Output = ()> + Send + 'static,
) {
    let working = tokio::spawn(work);
    tokio::spawn(async move {
        if working.await.is_err() {
            // A client that is gone needs no reason.
            let _gone = to_client.send(Err(broken("a stream"))).await;
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use hvprobe_proto::v1::host_client::HostClient;
    use hvprobe_proto::v1::host_server::{Host, HostServer};
    use hvprobe_proto::v1::{ReportRequest, ReportResponse};
    use tokio::net::UnixListener;
    use tokio::time::timeout;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::{Endpoint, Server};
    use tonic::{Code, Request};

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    /// Panics in the first call.
    #[derive(Default)]
    struct Frail(AtomicBool);

    #[tonic::async_trait]
    impl Host for Frail {
        async fn report(
            &self,
            _: Request<ReportRequest>,
        ) -> Result<tonic::Response<ReportResponse>, Status> {
            assert!(self.0.swap(true, Ordering::Relaxed), "on purpose");
            Ok(tonic::Response::new(ReportResponse::default()))
        }
    }

    #[tokio::test]
    async fn request_that_panics_says_so_and_the_next_on_its_connection_is_served() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let server = Server::builder()
            .layer(layer())
            .add_service(HostServer::new(Frail::default()));
        tokio::spawn(server.serve_with_incoming(listener));
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()));
        let mut client = HostClient::new(endpoint.unwrap().connect().await.unwrap());
        let mut report = async || {
            timeout(LONG, client.report(ReportRequest {}))
                .await
                .unwrap()
        };
        let error = report().await.unwrap_err();
        assert_eq!(error.code(), Code::Internal);
        assert_eq!(error.message(), "hvprobe is broken: a request panicked");
        assert!(report().await.is_ok());
    }

    #[tokio::test]
    async fn stream_that_panics_ends_with_an_error() {
        let (to_client, mut messages) = mpsc::channel(1);
        spawn(to_client.clone(), async move {
            to_client.send(Ok(7)).await.unwrap();
            panic!("on purpose");
        });
        assert_eq!(messages.recv().await.unwrap().unwrap(), 7);
        let error = messages.recv().await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Internal);
        assert!(messages.recv().await.is_none());
    }

    #[tokio::test]
    async fn stream_that_is_done_ends() {
        let (to_client, mut messages) = mpsc::channel::<Result<u8, _>>(1);
        spawn(to_client, async {});
        assert!(timeout(LONG, messages.recv()).await.unwrap().is_none());
    }
}
