//! `hvprobe.v1.Events`.
//!
//! ```text
//!   collector ──► Broadcast: encodes ──► a queue for each client, ──► Feed ──► its connection
//!    (thread)      a batch once           bounded in bytes           (task)
//! ```
//! What each of them keeps true is said in its module. The service is as the generator would write it,
//! but for one thing: a response is a [`Message`], whose events were encoded once for all clients.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use hvprobe_proto::v1::{ErrorKind, SubscribeRequest, events_server};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, http};
use tonic::server::{Grpc, NamedService, ServerStreamingService};
use tonic::{Code, Request, Response, Status};

use super::feed::{Feed, Origin};
use crate::events::codec::{Message, Wire};
use crate::events::published::Published;
use crate::fleet::Fleet;
use crate::limits;
use crate::panics;
use crate::status::Failure;

/// Messages between the machines and one client's connection.
const MESSAGES: usize = 2;

type Responses = ReceiverStream<Result<Message, Status>>;

/// The service.
#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
    published: Published,
}

impl Service {
    pub(crate) fn new(fleet: Fleet, published: Published) -> Self {
        Self { fleet, published }
    }

    fn subscribe(&self, request: SubscribeRequest) -> Result<Responses, Status> {
        let SubscribeRequest { machine, probes } = request;
        limits::at_most("the number of probes", probes.len(), limits::BATCH)?;
        // One for all machines' streams of this client.
        let place = Arc::new(self.fleet.totals().subscribers.take()?);
        let (to_client, messages) = mpsc::channel(MESSAGES);
        if let Some((name, broadcast)) = self.published.get(&machine) {
            let feed = Feed::new(Origin::Published(Arc::clone(name)), to_client.clone());
            let feed = feed.run(Some(broadcast.subscribe(&probes)));
            panics::spawn(to_client, holding(place, feed));
            return Ok(ReceiverStream::new(messages));
        }
        let handles = match machine.as_str() {
            "" if probes.is_empty() => self.fleet.live(),
            "" => {
                return Err(Failure::new(
                    Code::InvalidArgument,
                    ErrorKind::NoSuchProbe,
                    "probe ids belong to a machine: name it",
                )
                .into());
            }
            name => vec![self.fleet.get(name)?],
        };
        for handle in handles {
            // Of one that has ended only the last message is left.
            let live = handle.machine().is_ok();
            let events = live.then(|| handle.events().subscribe(&probes));
            let feed = Feed::new(Origin::Machine(handle), to_client.clone());
            let feed = holding(Arc::clone(&place), feed.run(events));
            panics::spawn(to_client.clone(), feed);
        }
        Ok(ReceiverStream::new(messages))
    }
}

/// Runs `feed`, and keeps `place` as long.
async fn holding<P>(place: Arc<P>, feed: impl Future<Output = ()>) {
    feed.await;
    drop(place);
}

/// The service as a connection calls it.
#[derive(Clone, Debug)]
pub(crate) struct EventsServer(Arc<Service>);

impl EventsServer {
    pub(crate) fn new(service: Service) -> Self {
        Self(Arc::new(service))
    }
}

impl NamedService for EventsServer {
    const NAME: &'static str = events_server::SERVICE_NAME;
}

impl tonic::codegen::Service<http::Request<Body>> for EventsServer {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if request.uri().path() != "/hvprobe.v1.Events/Subscribe" {
            return Box::pin(async { Ok(Status::new(Code::Unimplemented, "").into_http()) });
        }
        let method = Subscribe(Arc::clone(&self.0));
        Box::pin(async move {
            let mut grpc =
                Grpc::new(Wire).apply_max_message_size_config(Some(limits::MESSAGE), None);
            Ok(grpc.server_streaming(method, request).await)
        })
    }
}

/// The method.
struct Subscribe(Arc<Service>);

impl ServerStreamingService<SubscribeRequest> for Subscribe {
    type Response = Message;
    type ResponseStream = Responses;
    type Future = BoxFuture<Response<Responses>, Status>;

    fn call(&mut self, request: Request<SubscribeRequest>) -> Self::Future {
        let service = Arc::clone(&self.0);
        Box::pin(async move { service.subscribe(request.into_inner()).map(Response::new) })
    }
}
