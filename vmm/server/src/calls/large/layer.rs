//! The layer that applies the limits to every call.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::{Service, http};
use tower::Layer;

use super::answer;
use super::framing::Framing;
use super::request::{self, Messages};
use crate::bounds::totals::Totals;
use crate::calls::interface::Interface;
use crate::listen::connection::Link;

/// Layer that applies the limits for large requests and answers.
#[derive(Clone, Debug)]
pub(crate) struct LargeLayer {
    totals: Arc<Totals>,
    interface: Arc<Interface>,
}

impl LargeLayer {
    pub(crate) fn new(totals: Arc<Totals>, interface: Arc<Interface>) -> Self {
        Self { totals, interface }
    }
}

impl<S> Layer<S> for LargeLayer {
    type Service = Limited<S>;

    fn layer(&self, inner: S) -> Limited<S> {
        Limited {
            layer: self.clone(),
            inner,
        }
    }
}

/// A service inside the layer.
#[derive(Clone, Debug)]
pub(crate) struct Limited<S> {
    layer: LargeLayer,
    inner: S,
}

impl<S> Service<http::Request<Body>> for Limited<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let LargeLayer { totals, interface } = self.layer.clone();
        // Every call has a connection. If it were missing, the call would count as a connection of its own.
        let link = request.extensions().get::<Link>();
        let own = link.map(|it| Arc::clone(&it.own)).unwrap_or_default();
        let path = request.uri().path();
        let method = interface.method(path);
        let is_unary = interface.is_unary(path);
        let asks_once = method.map_or(is_unary, |it| it.asks_once);
        let is_long = is_unary && method.is_some_and(|it| it.is_long);
        let framing = Framing::new(interface, method.map(|it| it.input));
        if !asks_once {
            let request = request.map(|body| Body::new(Messages::new(body, framing, own, totals)));
            return Box::pin(self.inner.call(request));
        }
        // The instance that has been polled ready takes the call; its clone takes its place.
        let other = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, other);
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let complete = match request::complete(body, framing, &own, &totals).await {
                Ok(complete) => complete,
                Err(why) => return Ok(why.into_http()),
            };
            let permit = match is_long {
                true => Some(answer::permit(&own, &totals).await),
                false => None,
            };
            let permit = match permit.transpose() {
                Ok(permit) => permit,
                Err(why) => return Ok(why.into_http()),
            };
            let request = http::Request::from_parts(head, complete.body);
            let answer = inner.call(request).await?;
            drop(complete.permit);
            let Some(permit) = permit else {
                return Ok(answer);
            };
            let (head, body) = answer.into_parts();
            let body = answer::encoded(body, permit).await;
            Ok(http::Response::from_parts(head, body))
        })
    }
}

#[cfg(test)]
mod tests;
