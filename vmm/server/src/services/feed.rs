//! Sends one machine's events to one client.
//!
//! Invariants:
//! - a probe is described in the message with its first event, or in an earlier one;
//! - a loss is reported in the next message, and all events of that message come after the loss, so that a client
//!   that processes only a part of a message counts nothing twice;
//! - the anchor of the events' times is sent before any event;
//! - every wanted event before the position in a message is in that message or an earlier one, or was reported as
//!   lost there.

use std::collections::HashSet;
use std::sync::Arc;

use hvprobe_machine::queue::Taken;
use hvprobe_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use crate::events::codec::Message;
use crate::events::subscription::Subscription;
use crate::events::{Encoded, Lost, Position};
use crate::machines::Handle;
use crate::wire::{anchor, convert};

/// Total length of the events of a message, in bytes, from which on no further batch is added. With a last batch of
/// at most 1024 events, and all probes that it can describe, a message stays below the 4 MiB that clients accept.
const MESSAGE: usize = 256 << 10;
/// Maximum number of probes in one message. This also keeps a message below 4 MiB: the data that the actions of one
/// probe write can take 17 KiB.
const PROBES_PER_MESSAGE: usize = 64;

/// Source of events.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    Machine(Handle),
    /// A stream without a machine.
    Published(Arc<str>),
}

impl Origin {
    fn name(&self) -> &str {
        match self {
            Self::Machine(handle) => handle.name(),
            Self::Published(name) => name,
        }
    }

    /// Returns the UUID of the machine; empty if there is no machine.
    pub(crate) fn uid(&self) -> &str {
        match self {
            Self::Machine(handle) => handle.uid(),
            Self::Published(_) => "",
        }
    }

    /// Returns those of its probes that `ids` names.
    async fn probes(&self, ids: HashSet<u32>) -> Vec<v1::Probe> {
        let Self::Machine(handle) = self else {
            return Vec::new();
        };
        let named = handle.probes(move |mut probes| {
            probes.retain(|probe| ids.contains(&probe.id));
            probes
        });
        named.await.unwrap_or_else(|error| {
            tracing::error!(%error, "cannot describe probes");
            Vec::new()
        })
    }

    /// Waits until the machine has ended, and returns how. Returns `None` at once if there is no machine.
    async fn ended(&self) -> Option<v1::Ending> {
        match self {
            Self::Machine(handle) => handle.ended().await.machine.ending.clone(),
            Self::Published(_) => None,
        }
    }
}

/// Sends one machine's events to one client.
#[derive(Debug)]
pub(crate) struct Feed {
    origin: Origin,
    /// Probes that have been described to the client.
    described: HashSet<u32>,
    anchor: anchor::LastSent,
    /// Position of the stream.
    position: Position,
    to_client: mpsc::Sender<Result<Message, Status>>,
}

/// The client is gone.
struct Gone;

impl Feed {
    pub(crate) fn new(origin: Origin, to_client: mpsc::Sender<Result<Message, Status>>) -> Self {
        Self {
            origin,
            described: HashSet::new(),
            anchor: anchor::LastSent::default(),
            position: Position::default(),
            to_client,
        }
    }

    /// Runs until the machine has ended or the client is gone. Without `events` only the end of the machine is
    /// sent.
    pub(crate) async fn run(mut self, events: Option<Subscription>) {
        // A client that is gone is no error, and nobody is left to report it to.
        let _gone = self.feed(events).await;
    }

    async fn feed(&mut self, events: Option<Subscription>) -> Result<(), Gone> {
        let subscribed = events.is_some();
        if let Some(mut events) = events {
            self.position = events.start;
            let mut first = Message::default();
            first.head.position = self.proto_position();
            first.head.missed = events.missed;
            first.head.dropped = events.dropped;
            self.send(first).await?;
            let mut left = None;
            loop {
                let taken = match left.take() {
                    None => tokio::select! {
                        taken = events.next() => taken,
                        () = self.to_client.closed() => return Err(Gone),
                    },
                    left => left,
                };
                match taken {
                    Some(first) => left = self.pass_on(first, &mut events).await?,
                    None => break,
                }
            }
        }
        let ended = tokio::select! {
            ended = self.origin.ended() => ended,
            () = self.to_client.closed() => return Err(Gone),
        };
        let mut message = Message::default();
        message.head.ended = ended;
        if subscribed {
            message.head.position = self.proto_position();
        }
        self.send(message).await
    }

    /// Sends `first` and further batches that wait in `rest`, as many as fit into a message. Returns a batch
    /// that was taken but belongs into the next message.
    async fn pass_on(
        &mut self,
        first: Taken<Encoded, Lost>,
        rest: &mut Subscription,
    ) -> Result<Option<Taken<Encoded, Lost>>, Gone> {
        let mut message = Message::default();
        let mut unknown = HashSet::new();
        let mut bytes = 0;
        let mut next = Some(first);
        while let Some(taken) = next.take() {
            // Events that the machine dropped have no numbers, and positions count them separately. So only a loss
            // of numbered events needs a new message.
            if !message.events.is_empty() && taken.lost.until.seq > self.position.seq {
                next = Some(taken);
                break;
            }
            let Taken {
                lost,
                item,
                notices,
            } = taken;
            let throttled = notices.iter().map(convert::throttled);
            message.head.throttled.extend(throttled);
            let dropped = &mut message.head.dropped;
            *dropped = dropped.saturating_add(lost.count);
            self.position = self.position.join(lost.until);
            if let Some(Encoded {
                events,
                probes,
                end,
            }) = item
            {
                self.position = self.position.join(end);
                let news = probes.iter().filter(|id| !self.described.contains(id));
                unknown.extend(news);
                bytes += events.len();
                message.events.push(events);
            }
            next = (bytes < MESSAGE).then(|| rest.try_next()).flatten();
        }
        if !unknown.is_empty() {
            message.head.probes = self.describe(unknown).await?;
        }
        message.head.position = self.proto_position();
        self.send(message).await?;
        Ok(next)
    }

    /// Sends the descriptions of the probes `unknown` to the client, except for the last few, which it returns for
    /// the message that has the events.
    async fn describe(&mut self, unknown: HashSet<u32>) -> Result<Vec<v1::Probe>, Gone> {
        let mut probes = self.origin.probes(unknown.clone()).await;
        // A probe that was removed since its hit stays undescribed; it is not looked up again.
        self.described.extend(unknown);
        while probes.len() > PROBES_PER_MESSAGE {
            let rest = probes.split_off(PROBES_PER_MESSAGE);
            let mut message = Message::default();
            message.head.probes = std::mem::replace(&mut probes, rest);
            self.send(message).await?;
        }
        Ok(probes)
    }

    fn proto_position(&self) -> Option<v1::Position> {
        Some(self.position.to_proto(self.origin.uid()))
    }

    async fn send(&mut self, mut message: Message) -> Result<(), Gone> {
        message.head.anchor = self.anchor.news(anchor::now());
        self.origin.name().clone_into(&mut message.head.machine);
        self.to_client.send(Ok(message)).await.map_err(|_| Gone)
    }
}

#[cfg(test)]
mod tests;
