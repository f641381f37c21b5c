//! `hvprobe.v1.Events`.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;

use hvprobe_introspect::event::Event;
use hvprobe_introspect::probe::ProbeId;
use hvprobe_proto::v1::{self, ErrorKind, SubscribeRequest, SubscribeResponse, events_server};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::convert::Captures;
use super::error::Failure;
use super::fleet::{Fleet, Handle};
use super::{budget, convert, limits};
use crate::machine::{Delivery, Subscription};

/// Batches that wait for one client before it begins to lose events.
const QUEUE: usize = 256;
/// Messages between the machines and one client's connection.
const MESSAGES: usize = 4;
/// Events in one message, which stays well below the 4 MiB that clients accept: none takes more
/// than 2 KiB, with both its sets of registers and all it can have captured.
const EVENTS_PER_MESSAGE: usize = 1024;
/// Probes in one message, for the same reason: what one is to write can take 17 KiB.
const PROBES_PER_MESSAGE: usize = 64;

/// The service.
#[derive(Debug)]
pub(super) struct Service {
    fleet: Fleet,
}

impl Service {
    pub(super) fn new(fleet: Fleet) -> Self {
        Self { fleet }
    }
}

type Responses = Pin<Box<ReceiverStream<Result<SubscribeResponse, Status>>>>;

#[tonic::async_trait]
impl events_server::Events for Service {
    type SubscribeStream = Responses;

    async fn subscribe(
        &self,
        request: Request<SubscribeRequest>,
    ) -> Result<Response<Responses>, Status> {
        let SubscribeRequest { machine, probes } = request.into_inner();
        limits::at_most("the number of probes", probes.len(), limits::BATCH)?;
        let probes: Vec<_> = probes.into_iter().map(ProbeId).collect();
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
        let (to_client, messages) = mpsc::channel(MESSAGES);
        for handle in handles {
            let subscription = match handle.machine() {
                Ok(machine) => Some(machine.subscribe(probes.clone(), QUEUE)),
                // It has ended: only its last message is left.
                Err(_) => None,
            };
            let feed = Feed {
                handle,
                described: HashMap::new(),
                to_client: to_client.clone(),
            };
            tokio::spawn(feed.run(subscription));
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

/// Carries one machine's events to one client.
struct Feed {
    handle: Handle,
    /// Probes the client has been told about, and what they capture.
    described: HashMap<u32, Captures>,
    to_client: mpsc::Sender<Result<SubscribeResponse, Status>>,
}

/// The client is gone.
struct Gone;

impl Feed {
    /// Runs until the machine has ended or the client is gone.
    async fn run(mut self, subscription: Option<Subscription>) {
        // That the client is gone is no error, and there is nobody to tell it to.
        let _gone = self.feed(subscription).await;
    }

    async fn feed(&mut self, subscription: Option<Subscription>) -> Result<(), Gone> {
        if let Some(mut subscription) = subscription {
            self.send(SubscribeResponse::default()).await?;
            loop {
                let delivery = tokio::select! {
                    delivery = subscription.next() => delivery,
                    () = self.to_client.closed() => return Err(Gone),
                };
                match delivery {
                    Some(delivery) => self.pass_on(&delivery).await?,
                    None => break,
                }
            }
        }
        let ended = tokio::select! {
            ended = self.handle.ended() => ended,
            () = self.to_client.closed() => return Err(Gone),
        };
        self.send(SubscribeResponse {
            ended: ended.machine.ending.clone(),
            ..Default::default()
        })
        .await
    }

    async fn pass_on(&mut self, delivery: &Delivery) -> Result<(), Gone> {
        if !delivery.throttled.is_empty() {
            self.send(SubscribeResponse {
                throttled: delivery.throttled.iter().map(budget::notice).collect(),
                ..Default::default()
            })
            .await?;
        }
        let mut dropped = delivery.dropped;
        if delivery.events.is_empty() && dropped == 0 {
            return Ok(());
        }
        if delivery.events.is_empty() {
            let told = SubscribeResponse {
                dropped,
                ..Default::default()
            };
            return self.send(told).await;
        }
        for events in delivery.events.chunks(EVENTS_PER_MESSAGE) {
            let mut probes = self.describe(events).await;
            while probes.len() > PROBES_PER_MESSAGE {
                let rest = probes.split_off(PROBES_PER_MESSAGE);
                self.send(SubscribeResponse {
                    probes: std::mem::replace(&mut probes, rest),
                    ..Default::default()
                })
                .await?;
            }
            let none = Captures::default();
            let events = events.iter().map(|event| {
                let captures = self.described.get(&event.probe.0).unwrap_or(&none);
                convert::event(event, captures)
            });
            let events = events.collect();
            self.send(SubscribeResponse {
                probes,
                events,
                dropped: std::mem::take(&mut dropped),
                ..Default::default()
            })
            .await?;
        }
        Ok(())
    }

    /// The probes among `events` that the client does not know yet.
    async fn describe(&mut self, events: &[Event]) -> Vec<v1::Probe> {
        let unknown: HashSet<u32> = events
            .iter()
            .map(|event| event.probe.0)
            .filter(|probe| !self.described.contains_key(probe))
            .collect();
        if unknown.is_empty() {
            return Vec::new();
        }
        let mut probes = match self.handle.probes().await {
            Ok(probes) => probes,
            Err(error) => {
                tracing::error!(%error, "cannot describe probes");
                Vec::new()
            }
        };
        probes.retain(|probe| unknown.contains(&probe.id));
        // A probe that was removed since its hit stays undescribed; it is not asked for again.
        let nothing = unknown.into_iter().map(|id| (id, Captures::default()));
        self.described.extend(nothing);
        let captures = probes.iter().map(|probe| (probe.id, Captures::of(probe)));
        self.described.extend(captures);
        probes
    }

    async fn send(&self, mut message: SubscribeResponse) -> Result<(), Gone> {
        self.handle.name().clone_into(&mut message.machine);
        self.to_client.send(Ok(message)).await.map_err(|_| Gone)
    }
}
