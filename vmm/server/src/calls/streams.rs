//! Limit for the streams of all clients.
//!
//! Invariant: a streaming call holds a permit from before it begins until the client has received its last message
//! or has disconnected. Unary calls need no permit, so a client whose stream is refused can still end other streams
//! and stop machines.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body::{Body as HttpBody, Frame, SizeHint};
use prost::bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tower::Layer;

use super::interface::Interface;
use crate::bounds::totals::Totals;

/// Layer that takes a permit for each stream.
#[derive(Clone, Debug)]
pub(crate) struct StreamsLayer {
    totals: Arc<Totals>,
    interface: Arc<Interface>,
}

impl StreamsLayer {
    pub(crate) fn new(totals: Arc<Totals>, interface: Arc<Interface>) -> Self {
        Self { totals, interface }
    }
}

impl<S> Layer<S> for StreamsLayer {
    type Service = Streams<S>;

    fn layer(&self, inner: S) -> Streams<S> {
        Streams {
            layer: self.clone(),
            inner,
        }
    }
}

/// A service inside the layer.
#[derive(Clone, Debug)]
pub(crate) struct Streams<S> {
    layer: StreamsLayer,
    inner: S,
}

impl<S, R> Service<http::Request<R>> for Streams<S>
where
    S: Service<http::Request<R>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<R>) -> Self::Future {
        if self.layer.interface.is_unary(request.uri().path()) {
            return Box::pin(self.inner.call(request));
        }
        match self.layer.totals.streams.take() {
            Ok(place) => {
                let answer = self.inner.call(request);
                Box::pin(async move {
                    let answer = answer.await?;
                    Ok(answer.map(|body| {
                        Body::new(Held {
                            body,
                            _place: place,
                        })
                    }))
                })
            }
            Err(why) => Box::pin(async move { Ok(Status::from(why).into_http()) }),
        }
    }
}

/// An answer that holds a permit.
struct Held {
    body: Body,
    _place: OwnedSemaphorePermit,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
