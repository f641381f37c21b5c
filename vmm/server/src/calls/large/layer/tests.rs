//! Clients that send incomplete requests, or do not read their answers.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http_body::{Body as HttpBody, Frame};
use hvprobe_proto::v1::host_server::{Host, HostServer};
use hvprobe_proto::v1::{ErrorKind, ReportRequest, ReportResponse};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, timeout};
use tokio_stream::StreamExt as _;
use tonic::transport::Server;
use tonic::{Request, Status};
use tower::{ServiceExt as _, service_fn};

use super::super::request::{Frames, PATIENCE, WHOLE};
use super::super::sizes::SMALL;
use super::*;
use crate::bounds::limits;
use crate::bounds::permits::{Own, UNREAD};
use crate::bounds::server_limits::Limits;
use crate::listen::connection::{Admission, Connection};
use crate::status::tests::detail;

const LIST: &str = "/hvprobe.v1.Machines/ListMachines";
const REGISTER: &str = "/hvprobe.v1.Probes/Register";
const SUBSCRIBE: &str = "/hvprobe.v1.Events/Subscribe";
const UPLOAD: &str = "/hvprobe.v1.Sources/UploadDebugInfo";
const REPORT: &str = "/hvprobe.v1.Host/Report";
/// An empty entry of the list of probes in a `RegisterRequest`.
const EMPTY_PROBE: [u8; 2] = [0x12, 0x00];
const LARGE: usize = 2 * SMALL;

/// A body that the test sends, part by part.
struct Sent(mpsc::UnboundedReceiver<Bytes>);

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let received = self.0.poll_recv(cx);
        received.map(|data| data.map(|data| Ok(Frame::data(data))))
    }
}

/// A service inside the layer that reads requests and counts them.
#[derive(Clone)]
struct Served {
    totals: Arc<Totals>,
    interface: Arc<Interface>,
    served: Arc<AtomicUsize>,
}

struct Call {
    to_server: mpsc::UnboundedSender<Bytes>,
    answer: JoinHandle<Result<(), Status>>,
}

impl Call {
    fn send(&self, bytes: &[u8]) {
        for part in bytes.chunks(16 << 10) {
            self.to_server.send(Bytes::copy_from_slice(part)).unwrap();
        }
    }

    /// Ends the request; returns the kind of the error, if there is one.
    async fn end(self) -> Option<ErrorKind> {
        drop(self.to_server);
        let answer = timeout(Duration::from_mins(10), self.answer).await;
        let answer = answer.expect("an answer").unwrap();
        answer.err().map(|why| detail(&why).kind())
    }
}

impl Served {
    fn new(large_requests: usize) -> Self {
        let limits = Limits {
            large_requests,
            ..Limits::default()
        };
        Self {
            totals: Arc::new(Totals::new(limits)),
            interface: Arc::new(Interface::new()),
            served: Arc::default(),
        }
    }

    /// Begins a call over the connection whose calls share `own`.
    fn call(&self, own: &Arc<Own>, path: &str) -> Call {
        let (to_server, sent) = mpsc::unbounded_channel();
        let served = Arc::clone(&self.served);
        let inner = service_fn(move |request: http::Request<Body>| {
            let served = Arc::clone(&served);
            async move {
                let mut body = request.into_body();
                while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                    if let Err(why) = frame {
                        return Ok::<_, Infallible>(why.into_http());
                    }
                }
                served.fetch_add(1, Ordering::Relaxed);
                Ok(http::Response::new(Body::new(Frames(VecDeque::new()))))
            }
        });
        let layer = LargeLayer::new(Arc::clone(&self.totals), Arc::clone(&self.interface));
        let link = Link {
            number: 0,
            admission: Admission::Known,
            own: Arc::clone(own),
        };
        let request = http::Request::post(path).extension(link);
        let request = request.body(Body::new(Sent(sent))).unwrap();
        let answer = tokio::spawn(async move {
            let answer = layer.layer(inner).oneshot(request).await.unwrap();
            Status::from_header_map(answer.headers()).map_or(Ok(()), Err)
        });
        Call { to_server, answer }
    }

    fn count(&self) -> usize {
        self.served.load(Ordering::Relaxed)
    }
}

/// Returns a framed message of `length` bytes that has no field of the interface.
fn message(length: usize) -> Vec<u8> {
    // Field 1023, which fills the rest of the message.
    let mut message = vec![0xfa, 0x3f];
    prost::encoding::encode_varint(length.saturating_sub(7).try_into().unwrap(), &mut message);
    message.resize(length, 0);
    framed(&message)
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap();
    [&[0], &length.to_be_bytes()[..], message].concat()
}

/// Lets the other tasks run until they wait. The paused clock stands still meanwhile.
async fn settle() {
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn incomplete_large_requests_delay_small_ones_of_no_client_and_large_ones_for_a_while() {
    for path in [REGISTER, SUBSCRIBE, UPLOAD] {
        let served = Served::new(3);
        let incomplete = message(LARGE);
        let incomplete = &incomplete[..incomplete.len() - 1];
        let hostile: [Arc<Own>; 4] = std::array::from_fn(|_| Arc::default());
        let calls: Vec<_> = hostile
            .iter()
            .flat_map(|own| [own, own, own])
            .map(|own| served.call(own, path))
            .collect();
        calls.iter().for_each(|call| call.send(incomplete));
        settle().await;
        let usual = Arc::default();
        for path in [LIST, UPLOAD] {
            let call = served.call(&usual, path);
            call.send(&message(100));
            assert_eq!(call.end().await, None);
        }
        assert_eq!(served.count(), 2);
        // The incomplete requests have waited for a second when another request comes.
        advance(Duration::from_secs(1)).await;
        let since = Instant::now();
        let large = served.call(&usual, path);
        large.send(&message(LARGE));
        assert_eq!(large.end().await, None, "{path}");
        assert!(since.elapsed() < WHOLE, "{path}: {:?}", since.elapsed());
        assert_eq!(served.count(), 3);
        for Call { to_server, answer } in calls {
            let answer = timeout(Duration::from_mins(10), answer).await;
            let kind = detail(&answer.expect("an end").unwrap().unwrap_err()).kind();
            drop(to_server);
            assert!(
                [ErrorKind::TooSlow, ErrorKind::NoRoom].contains(&kind),
                "{path}: {kind:?}"
            );
        }
        assert_eq!(served.totals.large_requests.free(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_has_one_large_request_at_a_time() {
    let served = Served::new(2);
    let (one, other) = (Arc::default(), Arc::default());
    let calls = [&one, &one, &one].map(|own| served.call(own, UPLOAD));
    let large = message(LARGE);
    calls.iter().for_each(|call| call.send(&large[..LARGE]));
    settle().await;
    assert_eq!(served.totals.large_requests.free(), 1);
    let call = served.call(&other, REGISTER);
    call.send(&large);
    assert_eq!(call.end().await, None);
    // A permit is released when the service asks for the next message, although the stream continues.
    calls.iter().for_each(|call| call.send(&large[LARGE..]));
    settle().await;
    assert_eq!(served.totals.large_requests.free(), 2);
    advance(Duration::from_hours(1)).await;
    assert!(calls.iter().all(|call| !call.answer.is_finished()));
    for call in calls {
        assert_eq!(call.end().await, None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_gets_no_permit_is_refused_and_not_served() {
    let served = Served::new(1);
    let (one, other) = (Arc::default(), Arc::default());
    let held = served.totals.large_requests.take().unwrap();
    let since = Instant::now();
    for (own, path) in [(&one, REGISTER), (&other, UPLOAD)] {
        let call = served.call(own, path);
        call.send(&message(LARGE));
        assert_eq!(call.end().await, Some(ErrorKind::NoRoom), "{path}");
    }
    assert!(since.elapsed() >= 2 * PATIENCE && since.elapsed() < 2 * PATIENCE + WHOLE);
    assert_eq!(served.count(), 0);
    drop(held);
    let call = served.call(&one, REGISTER);
    call.send(&message(LARGE));
    assert_eq!(call.end().await, None);
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_too_heavy_once_decoded_are_refused_before() {
    let served = Served::new(2);
    let own = Arc::default();
    for (entries, kind) in [(16_384, None), (1 << 20, Some(ErrorKind::TooLarge))] {
        let call = served.call(&own, REGISTER);
        call.send(&framed(&EMPTY_PROBE.repeat(entries)));
        assert_eq!(call.end().await, kind, "{entries}");
    }
    assert_eq!(
        (served.count(), served.totals.large_requests.free()),
        (1, 2)
    );
}

#[tokio::test(start_paused = true)]
async fn requests_of_one_message_are_served_when_they_are_complete() {
    let served = Served::new(1);
    let own = Arc::default();
    // The message without the end of the request, and no message at all.
    for path in [LIST, SUBSCRIBE] {
        for sent in [message(100), Vec::new()] {
            let call = served.call(&own, path);
            call.send(&sent);
            let answer = timeout(2 * WHOLE, call.answer).await.expect("an answer");
            let why = answer.unwrap().unwrap_err();
            assert_eq!(detail(&why).kind(), ErrorKind::TooSlow, "{path}");
            drop(call.to_server);
        }
    }
    assert_eq!(served.count(), 0);
    // A message that is longer than the limit is not received to its end.
    let call = served.call(&own, LIST);
    call.send(&message(limits::MESSAGE + 1)[..SMALL]);
    assert_eq!(
        timeout(WHOLE / 2, call.answer)
            .await
            .expect("an end")
            .unwrap()
            .ok(),
        Some(())
    );
}

/// A host service whose reports are large. Counts its reports.
#[derive(Clone)]
struct Large(Arc<AtomicUsize>);

#[tonic::async_trait]
impl Host for Large {
    async fn report(
        &self,
        _: Request<ReportRequest>,
    ) -> Result<tonic::Response<ReportResponse>, Status> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(tonic::Response::new(ReportResponse {
            version: "v".repeat(LARGE),
            ..Default::default()
        }))
    }
}

/// Serves two connections with `large_answers` permits.
async fn serve(large_answers: usize) -> (Large, Arc<Totals>, [SendRequest<Body>; 2]) {
    let limits = Limits {
        large_answers,
        ..Limits::default()
    };
    let totals = Arc::new(Totals::new(limits));
    let large = Large(Arc::default());
    let (mut ends, mut clients) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let (client, end) = tokio::io::duplex(64 << 10);
        ends.push(Connection::known(end));
        clients.push(client);
    }
    let ends = tokio_stream::iter(ends).chain(tokio_stream::pending());
    let server = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .layer(LargeLayer::new(
            Arc::clone(&totals),
            Arc::new(Interface::new()),
        ))
        .add_service(HostServer::new(large.clone()))
        .serve_with_incoming(ends.map(Ok::<_, Infallible>));
    tokio::spawn(server);
    let mut senders = Vec::new();
    for client in clients {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        // The server can send one byte of an answer until the client reads it.
        builder.initial_stream_window_size(1);
        let (sender, connection) = builder.handshake(TokioIo::new(client)).await.unwrap();
        tokio::spawn(connection);
        senders.push(sender);
    }
    let senders = senders.try_into().ok().unwrap();
    (large, totals, senders)
}

async fn report(client: &mut SendRequest<Body>) -> http::Response<hyper::body::Incoming> {
    let request = http::Request::post(format!("http://server{REPORT}"));
    let request = request.header("content-type", "application/grpc");
    let request = request.body(Body::new(Frames(VecDeque::from([Ok(Frame::data(
        framed(&[]).into(),
    ))]))));
    client.send_request(request.unwrap()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn unread_answers_keep_their_permits_and_other_connections_have_one_of_their_own() {
    let (large, totals, [mut one, mut other]) = serve(2).await;
    // One with the connection's own permit, two with the server's.
    let mut unread = Vec::new();
    for _ in 0..3 {
        unread.push(report(&mut one).await);
    }
    settle().await;
    assert_eq!(
        (large.0.load(Ordering::Relaxed), totals.large_answers.free()),
        (3, 0)
    );
    let next = tokio::spawn({
        let mut one = one.clone();
        async move { report(&mut one).await }
    });
    settle().await;
    assert!(!next.is_finished());
    assert_eq!(large.0.load(Ordering::Relaxed), 3);
    for _ in 0..3 {
        drop(report(&mut other).await);
        settle().await;
    }
    // The waiting call continues when the client reads an answer, or drops one.
    drop(unread.pop());
    unread.push(
        timeout(Duration::from_secs(1), next)
            .await
            .expect("an answer")
            .unwrap(),
    );
    assert_eq!(large.0.load(Ordering::Relaxed), 7);
    drop(unread);
    settle().await;
    assert_eq!(totals.large_answers.free(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_connection_ends_whose_client_does_not_read_an_answer() {
    let (_large, totals, [mut one, mut other]) = serve(1).await;
    let since = Instant::now();
    let mut unread = report(&mut one).await.into_body();
    let end = poll_fn(|cx| Pin::new(&mut unread).poll_frame(cx));
    // The client reads the first frame, of one byte, and then stops.
    assert!(end.await.unwrap().is_ok());
    let closed = async {
        while one.ready().await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    timeout(2 * UNREAD, closed)
        .await
        .expect("the connection ends");
    assert!(since.elapsed() > UNREAD);
    settle().await;
    assert_eq!(totals.large_answers.free(), 1);
    // Other connections are not affected.
    drop(report(&mut other).await);
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_answer_finds_no_room_is_not_served() {
    let (large, _totals, [mut one, _other]) = serve(0).await;
    let _unread = report(&mut one).await;
    let refused = report(&mut one).await;
    let why = Status::from_header_map(refused.headers()).expect("an error");
    assert_eq!(detail(&why).kind(), ErrorKind::NoRoom, "{why:?}");
    assert_eq!(large.0.load(Ordering::Relaxed), 1);
}
