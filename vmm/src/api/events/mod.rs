//! `hvprobe.v1.Events`.
//!
//! ```text
//!   collector ──► Broadcast: encodes ──► a queue for each client, ──► Feed ──► its connection
//!    (thread)      a batch once           bounded in bytes           (task)
//! ```
//! What each of them keeps true is said in its module.

mod broadcast;
mod feed;
mod server;
mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_hit::event::Sink;
use hvprobe_proto::v1::{ErrorKind, SubscribeRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

pub(super) use broadcast::Broadcast;
pub(super) use server::EventsServer;

use super::error::Failure;
use super::fleet::Fleet;
use super::limits;
use crate::machine::Listen as _;
use feed::{Feed, Origin};
use server::Message;

/// Messages between the machines and one client's connection.
const MESSAGES: usize = 2;

type Responses = ReceiverStream<Result<Message, Status>>;

/// Streams of events that no machine stands behind, by name.
#[derive(Debug, Default)]
pub(super) struct Published(BTreeMap<Arc<str>, Broadcast>);

impl Published {
    /// A new one, which takes the place of an old one of that name.
    pub(super) fn add(&mut self, name: &str) -> Sink {
        let broadcast = Broadcast::default();
        let mut listener = broadcast.listener();
        self.0.insert(name.into(), broadcast);
        Box::new(move |events, dropped| {
            listener.hear(events, dropped);
        })
    }
}

/// The service.
#[derive(Debug)]
pub(super) struct Service {
    fleet: Fleet,
    published: Published,
}

impl Service {
    pub(super) fn new(fleet: Fleet, published: Published) -> Self {
        Self { fleet, published }
    }

    fn subscribe(&self, request: SubscribeRequest) -> Result<Responses, Status> {
        let SubscribeRequest { machine, probes } = request;
        limits::at_most("the number of probes", probes.len(), limits::BATCH)?;
        let (to_client, messages) = mpsc::channel(MESSAGES);
        if let Some((name, broadcast)) = self.published.0.get_key_value(machine.as_str()) {
            let feed = Feed::new(Origin::Published(Arc::clone(name)), to_client);
            tokio::spawn(feed.run(Some(broadcast.subscribe(&probes))));
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
            tokio::spawn(feed.run(events));
        }
        Ok(ReceiverStream::new(messages))
    }
}
