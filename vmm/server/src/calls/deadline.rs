//! Deadlines of calls.
//!
//! A client says how long it waits for a call (`grpc-timeout`, "PROTOCOL-HTTP2" of gRPC). Invariant: after that
//! time the call ends with DEADLINE_EXCEEDED, whether its answer has begun or not, and its handler or its answer is
//! dropped. The library checks a deadline only until the answer begins, and reports CANCELLED when it has passed.
//! So this layer checks the deadline before the library does. A timeout that cannot be parsed counts as none, as in
//! the library.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body as HttpBody, Frame};
use prost::bytes::Bytes;
use tokio::time::{Instant, Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tower::Layer;

use crate::status::over_deadline;

/// Layer that ends calls at their deadlines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeadlineLayer;

impl<S> Layer<S> for DeadlineLayer {
    type Service = Deadlines<S>;

    fn layer(&self, inner: S) -> Deadlines<S> {
        Deadlines(inner)
    }
}

/// Service whose calls end at their deadlines.
#[derive(Clone, Debug)]
pub(crate) struct Deadlines<S>(S);

impl<S, R> Service<http::Request<R>> for Deadlines<S>
where
    S: Service<http::Request<R>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<R>) -> Self::Future {
        let over = timeout(request.headers()).map(Over::after);
        let answer = self.0.call(request);
        let Some(mut over) = over else {
            return Box::pin(answer);
        };
        Box::pin(async move {
            tokio::select! {
                biased;
                answer = answer => Ok(answer?.map(|body| {
                    let body = Some(body);
                    Body::new(Until { body, over })
                })),
                () = &mut over => Ok(over_deadline().into_http()),
            }
        })
    }
}

/// Timer for the deadline of a call.
struct Over(Pin<Box<Sleep>>);

impl Over {
    fn after(timeout: Duration) -> Self {
        Self(Box::pin(sleep(timeout)))
    }
}

impl Future for Over {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let polled = self.0.as_mut().poll(cx);
        // If the library's own timer wakes the call before this timer does, the deadline has passed nevertheless.
        if self.0.deadline() <= Instant::now() {
            return Poll::Ready(());
        }
        polled
    }
}

/// Body of an answer, which ends at the deadline of its call.
struct Until {
    /// `None` after the deadline: the producer of the answer notices that the body is dropped.
    body: Option<Body>,
    over: Over,
}

impl HttpBody for Until {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        if Pin::new(&mut this.over).poll(cx).is_pending() {
            return Pin::new(body).poll_frame(cx);
        }
        this.body = None;
        let mut trailers = http::HeaderMap::new();
        let added = over_deadline().add_header(&mut trailers);
        Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }
}

/// Returns the timeout of a call, if its client states one that can be parsed: at most eight digits, and a
/// unit.
fn timeout(headers: &http::HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
