//! One machine's events on their way to one client.
//!
//! Invariant: a probe is described in the message its first event is in, or before; what was lost
//! is told with the message that follows the loss, all of whose events follow it, too, so that a client that
//! deals with a part of a message counts nothing twice; which wall-clock times events have is told first; all
//! that is before the position in a message has been sent or told as lost by then.

use std::collections::HashSet;
use std::sync::Arc;

use hvprobe_machine::queue::Taken;
use hvprobe_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use crate::events::codec::Message;
use crate::events::subscription::Subscription;
use crate::events::{Encoded, Lost, Position};
use crate::fleet::Handle;
use crate::wire::{anchor, budget};

/// Batches are put together to messages of so many bytes. With the last batch added, of at most 1024
/// events, and all the probes it can describe, a message stays below the 4 MiB that clients accept.
const MESSAGE: usize = 256 << 10;
/// Probes in one message, for the same reason: what one is to write can take 17 KiB.
const PROBES_PER_MESSAGE: usize = 64;

/// Where events come from.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    Machine(Handle),
    /// A name that no machine stands behind.
    Published(Arc<str>),
}

impl Origin {
    fn name(&self) -> &str {
        match self {
            Self::Machine(handle) => handle.name(),
            Self::Published(name) => name,
        }
    }

    /// What tells it from others of the name, if it is a machine.
    pub(crate) fn uid(&self) -> &str {
        match self {
            Self::Machine(handle) => handle.uid(),
            Self::Published(_) => "",
        }
    }

    /// Those of its probes that `ids` names.
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

    /// How it ended; returns when it has.
    async fn ended(&self) -> Option<v1::Ending> {
        match self {
            Self::Machine(handle) => handle.ended().await.machine.ending.clone(),
            Self::Published(_) => None,
        }
    }
}

/// Carries one machine's events to one client.
#[derive(Debug)]
pub(crate) struct Feed {
    origin: Origin,
    /// Probes the client has been told about.
    described: HashSet<u32>,
    anchor: anchor::Told,
    /// Where the stream is.
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
            anchor: anchor::Told::default(),
            position: Position::default(),
            to_client,
        }
    }

    /// Runs until the machine has ended or the client is gone. Of a machine without `events` only
    /// its end is told.
    pub(crate) async fn run(mut self, events: Option<Subscription>) {
        // That the client is gone is no error, and there is nobody to tell it to.
        let _gone = self.feed(events).await;
    }

    async fn feed(&mut self, events: Option<Subscription>) -> Result<(), Gone> {
        let subscribed = events.is_some();
        if let Some(mut events) = events {
            self.position = events.start;
            let mut first = Message::default();
            first.head.position = self.told();
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
            message.head.position = self.told();
        }
        self.send(message).await
    }

    /// Sends `first` and what else waits in `rest`, as much as fits in a message. Returns what was taken and
    /// belongs into the next one.
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
            // What was dropped in the machine has no place among the events, but a count of its own in positions.
            if !message.events.is_empty() && taken.lost.until.seq > self.position.seq {
                next = Some(taken);
                break;
            }
            let Taken {
                lost,
                item,
                notices,
            } = taken;
            let throttled = notices.iter().map(budget::notice);
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
        message.head.position = self.told();
        self.send(message).await?;
        Ok(next)
    }

    /// Tells the client about the probes `unknown`; returns the last of them, for the message that
    /// has their events.
    async fn describe(&mut self, unknown: HashSet<u32>) -> Result<Vec<v1::Probe>, Gone> {
        let mut probes = self.origin.probes(unknown.clone()).await;
        // A probe that was removed since its hit stays undescribed; it is not asked for again.
        self.described.extend(unknown);
        while probes.len() > PROBES_PER_MESSAGE {
            let rest = probes.split_off(PROBES_PER_MESSAGE);
            let mut message = Message::default();
            message.head.probes = std::mem::replace(&mut probes, rest);
            self.send(message).await?;
        }
        Ok(probes)
    }

    fn told(&self) -> Option<v1::Position> {
        Some(self.position.told(self.origin.uid()))
    }

    async fn send(&mut self, mut message: Message) -> Result<(), Gone> {
        message.head.anchor = self.anchor.news(anchor::now());
        self.origin.name().clone_into(&mut message.head.machine);
        self.to_client.send(Ok(message)).await.map_err(|_| Gone)
    }
}

#[cfg(test)]
mod tests;
