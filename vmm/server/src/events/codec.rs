//! Codec for the messages of `hvprobe.v1.Events`.

use hvprobe_proto::v1::{SubscribeRequest, SubscribeResponse};
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// A `SubscribeResponse`: the fields of `head`, followed by `events`. Each element of `events` is any number of
/// encoded events. Together they form one message, because fields may come in any order, and repeated fields in
/// any number of places (encoding guide, "Last One Wins").
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub(crate) head: SubscribeResponse,
    pub(crate) events: Vec<Bytes>,
}

/// Decodes requests with prost. Encodes the head of a response, and appends its encoded events as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire;

impl Codec for Wire {
    type Encode = Message;
    type Decode = SubscribeRequest;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Wire {
    type Item = Message;
    type Error = Status;

    fn encode(&mut self, item: Message, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let events: usize = item.events.iter().map(Bytes::len).sum();
        into.reserve(item.head.encoded_len() + events);
        item.head
            .encode(into)
            .map_err(|error| Status::internal(error.to_string()))?;
        for events in item.events {
            into.put_slice(&events);
        }
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::default()
    }
}

impl Decoder for Wire {
    type Item = SubscribeRequest;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<SubscribeRequest>, Status> {
        SubscribeRequest::decode(from)
            .map(Some)
            .map_err(|error| Status::invalid_argument(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::default()
    }
}
