//! `hvprobe.v1.Events`.
//!
//! ```text
//!   collector ──► Broadcast: encodes ──► a queue for each client, ──► Feed ──► its connection
//!    (thread)      a batch once           bounded in bytes           (task)
//! ```
//! The invariants are in the modules of these parts. The service is written as the generator would write it,
//! except that a response is a [`Message`], whose events are encoded once for all clients.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use hvprobe_proto::Failure;
use hvprobe_proto::v1::{ErrorKind, SubscribeRequest, events_server};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, http};
use tonic::server::{Grpc, NamedService, ServerStreamingService};
use tonic::{Code, Request, Response, Status};

use super::feed::{Feed, Origin};
use super::wanted::wanted;
use crate::bounds::limits;
use crate::calls::panics;
use crate::events::Position;
use crate::events::broadcast::Beyond;
use crate::events::codec::{Message, Wire};
use crate::events::published::Published;
use crate::events::wanted::Wanted;
use crate::machines::arrivals::Behind;
use crate::machines::{Fleet, Handle};

/// Capacity of the queue of messages between the machines and one client's connection.
const MESSAGES: usize = 2;
/// Maximum number of machines whose events go into one stream at a time; further machines wait. It is the default
/// maximum number of running machines, plus as many ended machines whose last messages still wait.
const MACHINES: usize = 128;

type Responses = ReceiverStream<Result<Message, Status>>;

#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
    published: Published,
}

impl Service {
    pub(crate) fn new(fleet: Fleet, published: Published) -> Self {
        Self { fleet, published }
    }

    fn subscribe(&self, mut request: SubscribeRequest) -> Result<Responses, Status> {
        let wanted = Arc::new(self.counted(wanted(&mut request)?)?);
        let SubscribeRequest { machine, after, .. } = request;
        // One permit for all machines' streams of this client.
        let place = Arc::new(self.fleet.totals().subscribers.take()?);
        let (origin, events, is_live) = if let Some((name, events)) = self.published.get(&machine) {
            (Origin::Published(Arc::clone(name)), events.clone(), true)
        } else if machine.is_empty() {
            let nameless = |kind, what| {
                let message = format!("{what} belong to a machine: name it");
                Err(Failure::invalid(kind, message).into())
            };
            if !wanted.probes.is_empty() {
                return nameless(ErrorKind::NoSuchProbe, "probe ids");
            }
            if after.is_some() {
                return nameless(ErrorKind::BadPosition, "positions");
            }
            let fleet = self.fleet.clone();
            let all = |to_client| holding(place, All::new(fleet, wanted, to_client).run());
            return Ok(panics::stream(MESSAGES, all));
        } else {
            let handle = self.fleet.get(&machine)?;
            let (events, is_live) = (handle.events().clone(), handle.is_live());
            (Origin::Machine(handle), events, is_live)
        };
        let after = match &after {
            Some(after) if after.machine_uid != origin.uid() => {
                return Err(Failure::new(
                    Code::FailedPrecondition,
                    ErrorKind::OtherMachine,
                    format!("the position is of another machine, which was called `{machine}`"),
                )
                .into());
            }
            Some(after) => Some(Position::from(after)),
            None => None,
        };
        // The stream of an ended machine has only its last message, unless the client asks for a position: then the
        // held events come first.
        let events = match is_live || after.is_some() {
            true => Some(events.subscribe(wanted, after).map_err(beyond)?),
            false => None,
        };
        let feed = |to_client| holding(place, Feed::new(origin, to_client).run(events));
        Ok(panics::stream(MESSAGES, feed))
    }

    /// Takes room for `wanted` from the pool of the lists, and from that of all waiting events.
    fn counted(&self, mut wanted: Wanted) -> Result<Wanted, Status> {
        if wanted.is_all() {
            return Ok(wanted);
        }
        let totals = self.fleet.totals();
        let weight = wanted.weight();
        for (pool, whose) in [
            (&totals.lists, "the lists and filters of all subscriptions"),
            (
                &totals.events,
                "all subscriptions and the events that wait for them",
            ),
        ] {
            let Some(room) = pool.take(weight) else {
                let left = pool.limit().saturating_sub(pool.taken());
                let message = format!(
                    "the lists and the filter of this subscription take {weight} bytes, and {left} are left of the \
                     {} that {whose} may have: name less, end another one, or raise `event_bytes` in the server's \
                     configuration",
                    pool.limit()
                );
                let kind = ErrorKind::TooManySubscribers;
                return Err(Failure::new(Code::ResourceExhausted, kind, message)
                    .bound("event_bytes", pool.limit(), left)
                    .into());
            };
            wanted.room.push(room);
        }
        Ok(wanted)
    }
}

/// Runs `feed`, and keeps `place` until it is done.
async fn holding<P>(place: Arc<P>, feed: impl Future<Output = ()>) {
    feed.await;
    drop(place);
}

fn beyond(_: Beyond) -> Status {
    let message = "the machine has not come to that position";
    Failure::invalid(ErrorKind::BadPosition, message).into()
}

/// Sends a client the events of all machines, including those that come later.
#[derive(Debug)]
struct All {
    fleet: Fleet,
    /// Shared by the subscriptions to all machines.
    wanted: Arc<Wanted>,
    to_client: mpsc::Sender<Result<Message, Status>>,
    places: Arc<Semaphore>,
}

impl All {
    fn new(
        fleet: Fleet,
        wanted: Arc<Wanted>,
        to_client: mpsc::Sender<Result<Message, Status>>,
    ) -> Self {
        Self {
            fleet,
            wanted,
            to_client,
            places: Arc::new(Semaphore::new(MACHINES)),
        }
    }

    /// Runs until the client is gone, or the server ends.
    async fn run(self) {
        let mut arrivals = self.fleet.arrivals();
        let live = self.fleet.live();
        // A machine that is booted at this moment can be both in `live` and announced.
        let known: HashSet<_> = live.iter().map(|handle| handle.uid().to_owned()).collect();
        for handle in live {
            self.feed(handle).await;
        }
        loop {
            let next = tokio::select! {
                next = arrivals.next() => next,
                () = self.to_client.closed() => return,
            };
            match next {
                Ok(Some(handle)) if known.contains(handle.uid()) => {}
                Ok(Some(handle)) => self.feed(handle).await,
                Ok(None) => return,
                Err(Behind) => {
                    let why = "machines come and go faster than this stream is read";
                    let end = Failure::new(Code::ResourceExhausted, ErrorKind::TooSlow, why);
                    // The client may be gone.
                    let _ = self.to_client.send(Err(end.into())).await;
                    return;
                }
            }
        }
    }

    /// Adds the events of a machine to the stream, as soon as there is a permit.
    async fn feed(&self, handle: Handle) {
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else {
            return;
        };
        let live = handle.is_live();
        let events = live.then(|| handle.events().subscribe(Arc::clone(&self.wanted), None));
        let feed = Feed::new(Origin::Machine(handle), self.to_client.clone());
        panics::spawn(self.to_client.clone(), async move {
            feed.run(events.and_then(Result::ok)).await;
            drop(place);
        });
    }
}

/// The service, in the form that a connection calls.
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

/// The method `Subscribe`.
struct Subscribe(Arc<Service>);

impl ServerStreamingService<SubscribeRequest> for Subscribe {
    type Response = Message;
    type ResponseStream = Responses;
    type Future = BoxFuture<Response<Responses>, Status>;

    fn call(&mut self, request: Request<SubscribeRequest>) -> Self::Future {
        let service = Arc::clone(&self.0);
        Box::pin(async move {
            let messages = service.subscribe(request.into_inner())?;
            Ok(Response::new(messages))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::limits::BATCH;

    #[test]
    fn lists_leave_room_for_the_events_of_others() {
        let fleet = Fleet::default();
        let service = Service::new(fleet.clone(), Published::default());
        let totals = fleet.totals();
        let list: Vec<_> = (0..u32::try_from(BATCH).unwrap()).collect();
        let mut held = Vec::new();
        let refused = loop {
            match service.counted(Wanted::of_probes(&list)) {
                Ok(counted) => held.push(counted),
                Err(refused) => break refused,
            }
        };
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(refused.message().contains("filters of all"), "{refused}");
        let quarter = totals.events.limit() / 4;
        let weight = held[0].weight();
        let taken = totals.events.taken();
        assert!(quarter - weight < taken && taken <= quarter, "{taken}");
        assert!(totals.events.take(quarter * 3).is_some());
        // A selection of all events takes no room.
        assert!(service.counted(Wanted::default()).is_ok());
        drop(held);
        assert_eq!((totals.events.taken(), totals.lists.taken()), (0, 0));
    }
}
