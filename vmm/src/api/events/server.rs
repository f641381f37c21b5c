//! The service `hvprobe.v1.Events` on the wire.
//!
//! As the generator would write it, but for one thing: a response is a [`Message`], whose events were
//! encoded once for all clients.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use hvprobe_proto::v1::{SubscribeRequest, SubscribeResponse, events_server};
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes};
use tonic::body::Body;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::{BoxFuture, http};
use tonic::server::{Grpc, NamedService, ServerStreamingService};
use tonic::{Code, Request, Response, Status};

use super::{Responses, Service};
use crate::api::limits;

/// A `SubscribeResponse`: the fields of `head`, then `events`, each of which is any number of that
/// message's events, encoded. Together they are one message, as fields may come in any order and
/// those that repeat in any number of places (encoding guide, "Last One Wins").
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) head: SubscribeResponse,
    pub(super) events: Vec<Bytes>,
}

/// The service as a connection calls it.
#[derive(Clone, Debug)]
pub(in crate::api) struct EventsServer(Arc<Service>);

impl EventsServer {
    pub(in crate::api) fn new(service: Service) -> Self {
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

/// Requests as protobuf has them, responses as they are.
#[derive(Clone, Copy, Debug)]
struct Wire;

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
