//! Batches of events in wire format.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

use hvprobe_hit::event::Event;
use hvprobe_proto::v1;
use prost::Message as _;
use prost::bytes::{Buf as _, Bytes};

use super::position::Position;
use super::wanted::{Facts, Wanted};
use crate::wire::event::{self, EVENT_MAX};

/// Overhead of an encoded batch, in bytes: the struct itself, its entries in queues, and its reference counts.
pub(crate) const OVERHEAD: usize = 256;

/// An encoded batch of events. Clones share its bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Encoded {
    /// Encoded events, ready to be part of a `SubscribeResponse`.
    pub(crate) events: Bytes,
    /// Probes of the events, each once.
    pub(crate) probes: Arc<[u32]>,
    /// Position of a stream after this batch.
    pub(crate) end: Position,
}

impl Encoded {
    /// Returns the memory that the batch takes if nothing else shares it, in bytes.
    pub(crate) fn weight(&self) -> usize {
        self.events.len() + self.probes.len() * size_of::<u32>() + OVERHEAD
    }

    /// Removes the first `count` events.
    pub(crate) fn without(mut self, count: u64) -> Self {
        let mut all = Events(self.events.clone());
        for _ in 0..count {
            all.next();
        }
        self.events = all.0;
        self
    }
}

/// Picks the wanted events of a batch, a few at a time, because a filter may take long.
#[derive(Debug)]
pub(crate) struct Sieve {
    left: Events,
    picked: Vec<u8>,
    probes: Vec<u32>,
    end: Position,
}

impl Sieve {
    /// Creates a sieve for the events of `encoded`.
    pub(crate) fn of(encoded: Encoded) -> Self {
        Self {
            left: Events(encoded.events),
            picked: Vec::new(),
            probes: Vec::new(),
            end: encoded.end,
        }
    }

    /// Checks up to `count` more events. Returns false once there are no more.
    pub(crate) fn look(&mut self, wanted: &Wanted, count: usize) -> bool {
        for _ in 0..count {
            let Some(one) = self.left.next() else {
                return false;
            };
            let message = v1::SubscribeResponse::decode(one.clone());
            let message = message.unwrap_or_default();
            let is_wanted = |event: &&v1::Event| wanted.has(&Facts::from(*event));
            if let Some(event) = message.events.iter().find(is_wanted) {
                self.picked.extend_from_slice(&one);
                self.probes.push(event.probe);
            }
        }
        true
    }

    /// Returns the picked events.
    pub(crate) fn end(self) -> Encoded {
        Encoded {
            events: self.picked.into(),
            probes: each_once(self.probes),
            end: self.end,
        }
    }
}

/// The events of a batch, each as an encoded field of a message.
#[derive(Debug)]
struct Events(Bytes);

impl Iterator for Events {
    type Item = Bytes;

    /// Each event is a key of one byte, a length and that many bytes, as [`event::event`] writes it.
    fn next(&mut self) -> Option<Bytes> {
        let mut rest = self.0.get(1..)?;
        let whole = rest.len();
        let len = prost::encoding::decode_varint(&mut rest).ok()?;
        let head = 1 + whole - rest.remaining();
        let end = usize::try_from(len).ok()?.checked_add(head)?;
        (end <= self.0.len()).then(|| self.0.split_to(end))
    }
}

/// Encoder of batches. Its buffers are reused for each batch.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    bytes: Vec<u8>,
    /// End of each event in `bytes`.
    ends: Vec<usize>,
    /// Buffer for the events that one client wants.
    picked: Vec<u8>,
}

impl Encoder {
    /// Encodes all of `events`; `end` is the position of a stream after them.
    pub(crate) fn all(&mut self, events: &[Event], end: Position) -> Encoded {
        self.bytes.clear();
        self.ends.clear();
        let mut probes = Vec::new();
        for event in events {
            self.bytes.reserve(EVENT_MAX);
            event::event(event, &mut self.bytes);
            self.ends.push(self.bytes.len());
            note(&mut probes, event);
        }
        Encoded {
            events: Bytes::copy_from_slice(&self.bytes),
            probes: each_once(probes),
            end,
        }
    }

    /// Returns the encoding of the events at the indexes `wanted`. The last call of [`Encoder::all`] must have been
    /// for `events`.
    pub(crate) fn some(&mut self, events: &[Event], wanted: &[usize], end: Position) -> Encoded {
        self.picked.clear();
        let mut probes = Vec::new();
        for index in wanted {
            let found = events.get(*index).zip(self.bytes.get(self.place(*index)));
            if let Some((event, bytes)) = found {
                self.picked.extend_from_slice(bytes);
                note(&mut probes, event);
            }
        }
        Encoded {
            events: Bytes::copy_from_slice(&self.picked),
            probes: each_once(probes),
            end,
        }
    }

    fn place(&self, index: usize) -> Range<usize> {
        let end = |index: usize| self.ends.get(index).copied();
        let start = index.checked_sub(1).and_then(end).unwrap_or(0);
        start..end(index).unwrap_or(start)
    }
}

/// Adds the probe of `event`, unless it was added last: events of one probe often follow each other.
fn note(probes: &mut Vec<u32>, event: &Event) {
    if probes.last() != Some(&event.probe.0) {
        probes.push(event.probe.0);
    }
}

fn each_once(mut probes: Vec<u32>) -> Arc<[u32]> {
    probes.sort_unstable();
    probes.dedup();
    probes.into()
}
