//! Batches of events as they go over the wire.

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

/// What an encoded batch takes besides its bytes: itself, its places in queues, and the counts that
/// it is shared with.
pub(crate) const OVERHEAD: usize = 256;

/// A batch of events, encoded. Copies share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Encoded {
    /// Ready to be part of a `SubscribeResponse`.
    pub(crate) events: Bytes,
    /// The probes they are of, each once.
    pub(crate) probes: Arc<[u32]>,
    /// Where a stream is behind it.
    pub(crate) end: Position,
}

impl Encoded {
    /// The memory it takes where nobody shares it.
    pub(crate) fn weight(&self) -> usize {
        self.events.len() + self.probes.len() * size_of::<u32>() + OVERHEAD
    }

    /// Without its first events, so many.
    pub(crate) fn without(mut self, count: u64) -> Self {
        let mut all = Events(self.events.clone());
        for _ in 0..count {
            all.next();
        }
        self.events = all.0;
        self
    }
}

/// Picks those events of a batch that are wanted, some at a time: what a filter says may take long.
#[derive(Debug)]
pub(crate) struct Sieve {
    left: Events,
    picked: Vec<u8>,
    probes: Vec<u32>,
    end: Position,
}

impl Sieve {
    /// One for the events of `encoded`.
    pub(crate) fn of(encoded: Encoded) -> Self {
        Self {
            left: Events(encoded.events),
            picked: Vec::new(),
            probes: Vec::new(),
            end: encoded.end,
        }
    }

    /// Looks at so many more; whether there are others.
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

    /// What was picked.
    pub(crate) fn end(self) -> Encoded {
        Encoded {
            events: self.picked.into(),
            probes: each_once(self.probes),
            end: self.end,
        }
    }
}

/// The events of a batch, each as the part of a message that it is.
#[derive(Debug)]
struct Events(Bytes);

impl Iterator for Events {
    type Item = Bytes;

    /// Each is a field of one byte, a length and so many bytes, as [`event::event`] writes it.
    fn next(&mut self) -> Option<Bytes> {
        let mut rest = self.0.get(1..)?;
        let whole = rest.len();
        let len = prost::encoding::decode_varint(&mut rest).ok()?;
        let head = 1 + whole - rest.remaining();
        let end = usize::try_from(len).ok()?.checked_add(head)?;
        (end <= self.0.len()).then(|| self.0.split_to(end))
    }
}

/// Encodes batches, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    bytes: Vec<u8>,
    /// Where each event ends in them.
    ends: Vec<usize>,
    /// What of them one client wants.
    picked: Vec<u8>,
}

impl Encoder {
    /// All of `events`, behind which a stream is at `end`.
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

    /// Of `events`, which were encoded last, those at `wanted`.
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

/// Those of one probe often follow each other.
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
