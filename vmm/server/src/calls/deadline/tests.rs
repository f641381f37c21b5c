use std::convert::Infallible;

use http_body::SizeHint;
use hvprobe_proto::v1::host_client::HostClient;
use hvprobe_proto::v1::host_server::{Host, HostServer};
use hvprobe_proto::v1::{ErrorKind, ReportRequest, ReportResponse};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Request};
use tower::{ServiceExt as _, service_fn};

use super::*;
use crate::status::tests::detail;

const PATIENCE: Duration = Duration::from_secs(60);

fn headers(timeout: &str) -> http::HeaderMap {
    let mut headers = http::HeaderMap::new();
    headers.insert("grpc-timeout", timeout.parse().unwrap());
    headers
}

#[test]
fn timeouts_are_read_as_they_are_written_and_nonsense_is_none() {
    let cases = [
        ("1H", Some(Duration::from_hours(1))),
        ("2M", Some(Duration::from_mins(2))),
        ("3S", Some(Duration::from_secs(3))),
        ("45m", Some(Duration::from_millis(45))),
        ("6u", Some(Duration::from_micros(6))),
        ("0n", Some(Duration::ZERO)),
        ("99999999n", Some(Duration::from_nanos(99_999_999))),
        ("99999999H", Some(Duration::from_secs(99_999_999 * 60 * 60))),
        ("999999999n", None),
        ("S", None),
        ("1", None),
        ("", None),
        ("-1S", None),
        ("+1S", None),
        (" 1S", None),
        ("1.5S", None),
        ("1s", None),
        ("1mS", None),
    ];
    for (text, expected) in cases {
        assert_eq!(timeout(&headers(text)), expected, "{text}");
    }
    assert_eq!(timeout(&http::HeaderMap::new()), None);
    let mut beyond_ascii = http::HeaderMap::new();
    let value = http::HeaderValue::from_bytes("1ä".as_bytes()).unwrap();
    beyond_ascii.insert("grpc-timeout", value);
    assert_eq!(timeout(&beyond_ascii), None);
}

/// An answer that continues as long as its sender exists.
struct Endless(mpsc::Receiver<Bytes>);

impl HttpBody for Endless {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let next = self.0.poll_recv(cx);
        next.map(|next| next.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

async fn next(body: &mut Body) -> Option<Frame<Bytes>> {
    let next = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
    next.await.transpose().unwrap()
}

/// Makes a call with this timeout, which `answer` answers.
async fn call<F>(timeout: &str, answer: impl Fn() -> F) -> http::Response<Body>
where
    F: Future<Output = Result<http::Response<Body>, Infallible>> + Send + 'static,
{
    let mut request = http::Request::new(());
    *request.headers_mut() = headers(timeout);
    let service = DeadlineLayer.layer(service_fn(|_: http::Request<()>| answer()));
    service.oneshot(request).await.unwrap()
}

fn exceeded(headers: &http::HeaderMap) -> Status {
    let status = Status::from_header_map(headers).unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(detail(&status).kind(), ErrorKind::DeadlineExceeded);
    status
}

#[tokio::test(start_paused = true)]
async fn answer_that_goes_on_ends_with_its_deadline_and_is_let_go_of() {
    let (more, bytes) = mpsc::channel(1);
    let bytes = std::sync::Mutex::new(Some(bytes));
    let answer = || {
        let bytes = bytes.lock().unwrap().take().unwrap();
        async { Ok(http::Response::new(Body::new(Endless(bytes)))) }
    };
    let begun = Instant::now();
    let mut body = call("1S", answer).await.into_body();
    more.send(Bytes::from_static(b"first")).await.unwrap();
    let first = next(&mut body).await.unwrap().into_data().unwrap();
    assert_eq!(&first[..], b"first");
    assert_eq!(begun.elapsed(), Duration::ZERO);
    assert!(!body.is_end_stream());
    let last = next(&mut body).await.unwrap().into_trailers().unwrap();
    exceeded(&last);
    assert!((1000..1010).contains(&begun.elapsed().as_millis()));
    assert!(more.is_closed() && body.is_end_stream());
    assert!(next(&mut body).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn answer_that_always_has_more_ends_with_its_deadline() {
    let (more, bytes) = mpsc::channel(1);
    let bytes = std::sync::Mutex::new(Some(bytes));
    let answer = || {
        let bytes = bytes.lock().unwrap().take().unwrap();
        async { Ok(http::Response::new(Body::new(Endless(bytes)))) }
    };
    let mut body = call("1S", answer).await.into_body();
    more.try_send(Bytes::from_static(b"late")).unwrap();
    tokio::time::advance(Duration::from_secs(1)).await;
    exceeded(&next(&mut body).await.unwrap().into_trailers().unwrap());
}

#[tokio::test(start_paused = true)]
async fn calls_without_a_deadline_that_can_be_read_wait_and_those_answered_in_time_are() {
    let after = |seconds| async move {
        sleep(Duration::from_secs(seconds)).await;
        Ok(http::Response::new(Body::empty()))
    };
    for (timeout, seconds, is_over) in [
        ("nonsense", 3600, false),
        ("2S", 1, false),
        ("1S", 2, true),
        ("0m", 1, true),
    ] {
        let answer = call(timeout, || after(seconds)).await;
        let status = Status::from_header_map(answer.headers());
        assert_eq!(status.is_some(), is_over, "{timeout}");
        assert!(answer.into_body().is_end_stream());
    }
}

/// Never answers.
struct Patient;

#[tonic::async_trait]
impl Host for Patient {
    async fn report(
        &self,
        _: Request<ReportRequest>,
    ) -> Result<tonic::Response<ReportResponse>, Status> {
        std::future::pending().await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn call_that_is_not_answered_in_time_says_so_sooner_than_the_library_does() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let server = Server::builder()
        .layer(DeadlineLayer)
        .add_service(HostServer::new(Patient));
    tokio::spawn(server.serve_with_incoming(listener));
    // Not the library's client, which would check the deadline itself.
    let stream = TokioIo::new(UnixStream::connect(&socket).await.unwrap());
    let connected = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await;
    let (sender, connection) = connected.unwrap();
    tokio::spawn(connection);
    let channel = service_fn(move |request: http::Request<Body>| {
        let mut sender = sender.clone();
        async move { sender.send_request(request).await }
    });
    let origin = http::Uri::from_static("http://localhost");
    let client = HostClient::with_origin(channel, origin);
    // Repeated, because the timers of the layer and of the library race.
    for number in 0..50 {
        let mut request = Request::new(ReportRequest {});
        let timeout = format!("{}m", 1 + number % 7);
        let metadata = request.metadata_mut();
        metadata.insert("grpc-timeout", timeout.parse().unwrap());
        let mut client = client.clone();
        let answer = tokio::time::timeout(PATIENCE, client.report(request)).await;
        let status = answer.expect("it ends").unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        assert_eq!(detail(&status).kind(), ErrorKind::DeadlineExceeded);
    }
}
