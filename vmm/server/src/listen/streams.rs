//! How many streams clients have of the server.
//!
//! Invariant: a call with more than one message, asked or answered, has one of the places for streams from before
//! it begins until its last message has been taken, or its client is gone. Calls with one question and one answer
//! need none, so that a client whose stream is refused can end others, and machines be stopped.

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body::{Body as HttpBody, Frame, SizeHint};
use hvprobe_proto::FILE_DESCRIPTOR_SET;
use prost::Message as _;
use prost::bytes::Bytes;
use prost_types::{FileDescriptorSet, MethodDescriptorProto};
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tower::Layer;

use crate::totals::Totals;

/// Gives calls places.
#[derive(Clone, Debug)]
pub(crate) struct StreamsLayer {
    totals: Arc<Totals>,
    /// The paths of calls with one question and one answer.
    single: Arc<HashSet<String>>,
}

impl StreamsLayer {
    pub(crate) fn new(totals: Arc<Totals>) -> Self {
        Self {
            totals,
            single: Arc::new(single()),
        }
    }
}

/// The paths of the interface's calls with one question and one answer. What is not known to be so may have more.
fn single() -> HashSet<String> {
    let mut paths = HashSet::from(["/grpc.health.v1.Health/Check".to_owned()]);
    // It is the one that reflection is offered by.
    let files = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap_or_default();
    for file in &files.file {
        for service in &file.service {
            let is_single =
                |it: &&MethodDescriptorProto| !it.server_streaming() && !it.client_streaming();
            let methods = service.method.iter().filter(is_single);
            paths.extend(
                methods.map(|method| {
                    format!("/{}.{}/{}", file.package(), service.name(), method.name())
                }),
            );
        }
    }
    paths
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

/// Calls, of which streams have places.
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
        if self.layer.single.contains(request.uri().path()) {
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

/// An answer that holds a place until it has been taken.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_with_one_question_and_one_answer_are_known() {
        let single = single();
        for path in [
            "/hvprobe.v1.Machines/Stop",
            "/hvprobe.v1.Machines/ListMachines",
            "/hvprobe.v1.Probes/Unregister",
            "/hvprobe.v1.Host/Report",
            "/grpc.health.v1.Health/Check",
        ] {
            assert!(single.contains(path), "{path}");
        }
        for path in [
            "/hvprobe.v1.Events/Subscribe",
            "/hvprobe.v1.Machines/WatchMachines",
            "/hvprobe.v1.Decisions/Decide",
            "/hvprobe.v1.Sources/UploadDebugInfo",
            "/grpc.health.v1.Health/Watch",
            "/",
        ] {
            assert!(!single.contains(path), "{path}");
        }
    }
}
