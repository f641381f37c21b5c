//! Clients that read events, and clients that do not.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use hdrhistogram::Histogram;
use hvprobe_proto::roomy;
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_proto::v1::{SubscribeRequest, SubscribeResponse};
use prost::Message as _;
use serde::{Deserialize, Serialize};
use tonic::Streaming;
use tonic::transport::Endpoint;

use super::meter::{cpu_microseconds, end_with_parent, now_ns, peak_kibibytes};

/// Name under which the events are published.
pub(crate) const NAME: &str = "synthetic";

/// Results of all clients of a process together, printed as a line of JSON.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Got {
    pub(crate) events: u64,
    pub(crate) bytes: u64,
    pub(crate) dropped: u64,
    /// Time from the first event to the last.
    pub(crate) nanoseconds: u64,
    pub(crate) cpu_microseconds: u64,
    pub(crate) kibibytes: u64,
    /// Time from a hit to the client: median, 99th percentile and maximum, in microseconds.
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    pub(crate) max: u64,
}

async fn subscribe(socket: &str, filter: &str) -> Result<Streaming<SubscribeResponse>> {
    let endpoint = Endpoint::from_shared(format!("unix:{socket}"))?;
    let channel = roomy(endpoint).connect().await?;
    let request = SubscribeRequest {
        machine: NAME.to_owned(),
        filter: filter.to_owned(),
        ..Default::default()
    };
    let mut stream = EventsClient::new(channel)
        .subscribe(request)
        .await?
        .into_inner();
    stream.message().await?.context("the stream has ended")?;
    Ok(stream)
}

/// Results of one client.
struct Counted {
    events: u64,
    bytes: u64,
    dropped: u64,
    first: Option<Instant>,
    last: Instant,
    microseconds: Histogram<u64>,
}

/// Runs `count` clients that read all events that pass `filter`, and prints their results.
pub(crate) fn client(socket: &str, filter: &str, count: u64) -> Result<()> {
    end_with_parent()?;
    // A runtime with several threads: with only one client, one thread decodes its messages, and others read its
    // connection.
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let mut streams = Vec::new();
        for _ in 0..count {
            streams.push(subscribe(socket, filter).await?);
        }
        println!("subscribed");
        let here = streams.pop().context("no client")?;
        let clients: Vec<_> = streams
            .into_iter()
            .map(|stream| tokio::spawn(take(stream)))
            .collect();
        let mut all = vec![take(here).await?];
        for client in clients {
            all.push(client.await??);
        }
        let mut got = Got::default();
        let mut microseconds = Histogram::<u64>::new(3)?;
        for counted in all {
            got.events += counted.events;
            got.bytes += counted.bytes;
            got.dropped += counted.dropped;
            let first = counted.first.context("nothing came")?;
            let took = u64::try_from(counted.last.duration_since(first).as_nanos())?;
            got.nanoseconds = got.nanoseconds.max(took);
            microseconds.add(&counted.microseconds)?;
        }
        got.cpu_microseconds = cpu_microseconds()?;
        got.kibibytes = peak_kibibytes()?;
        got.p50 = microseconds.value_at_quantile(0.5);
        got.p99 = microseconds.value_at_quantile(0.99);
        got.max = microseconds.max();
        println!("{}", serde_json::to_string(&got)?);
        Ok(())
    })
}

async fn take(mut stream: Streaming<SubscribeResponse>) -> Result<Counted> {
    let mut counted = Counted {
        events: 0,
        bytes: 0,
        dropped: 0,
        first: None,
        last: Instant::now(),
        microseconds: Histogram::new(3)?,
    };
    let mut next = 0;
    while let Some(message) = stream.message().await? {
        counted.dropped += message.dropped;
        counted.events += message.events.len() as u64;
        let now = now_ns()?;
        // The positions of the events have gaps where events were dropped for this client.
        for event in &message.events {
            ensure!(event.seq >= next, "events changed their order");
            next = event.seq + 1;
        }
        // Of many events, a sample is enough.
        for event in message.events.iter().step_by(1 + message.events.len() / 64) {
            let micros = now.saturating_sub(event.host_ns) / 1000;
            counted.microseconds.record(micros)?;
        }
        if let Some(event) = message.events.last() {
            // All events have about the same size.
            counted.bytes += (event.encoded_len() * message.events.len()) as u64;
            counted.last = Instant::now();
            counted.first.get_or_insert(counted.last);
        }
    }
    Ok(counted)
}

/// Subscribes `count` times and reads nothing more, until the process is killed.
pub(crate) fn stuck(socket: &str, count: u64) -> Result<()> {
    end_with_parent()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut unread = Vec::new();
        for _ in 0..count {
            unread.push(subscribe(socket, "").await?);
        }
        println!("subscribed");
        std::future::pending().await
    })
}
