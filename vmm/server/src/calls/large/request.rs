//! Receives requests.
//!
//! Invariants: a request of one message is complete before the service decodes it, so an unfinished request never
//! occupies more than its bytes. A large message gets a permit before more of it is received. While it waits for
//! the permit, it holds nothing but the bytes received so far.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body as HttpBody, Frame};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use prost::bytes::Bytes;
use tokio::time::{Instant, Sleep, sleep, timeout, timeout_at};
use tonic::body::Body;
use tonic::{Code, Status};

use super::framing::{Framing, Size};
use super::sizes::{HEAVIEST, SMALL};
use crate::bounds::limits;
use crate::bounds::permits::{Own, RequestPermit};
use crate::bounds::totals::Totals;

/// Maximum time for a message to arrive, counted from its beginning and, if it needs a permit, again from when it
/// gets the permit.
pub(super) const WHOLE: Duration = Duration::from_secs(45);
/// Maximum time that a large message waits for its permit: longer than an incomplete message may keep one.
pub(super) const PATIENCE: Duration = Duration::from_secs(50);

/// A request of one message.
pub(super) struct Complete {
    pub(super) body: Body,
    /// The permit, if the request is large.
    pub(super) permit: Option<RequestPermit>,
}

/// Receives the whole of a request that consists of one message.
///
/// # Errors
/// When the request is too heavy, arrives too slowly, or gets no permit.
pub(super) async fn complete(
    mut body: Body,
    mut framing: Framing,
    own: &Arc<Own>,
    totals: &Totals,
) -> Result<Complete, Status> {
    let mut frames = VecDeque::new();
    let (mut bytes, mut permit) = (0_usize, None);
    let mut deadline = Instant::now() + WHOLE;
    loop {
        let next = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let Some(frame) = timeout_at(deadline, next).await.map_err(|_| too_slow())? else {
            break;
        };
        let frame = frame?;
        if let Some(data) = frame.data_ref() {
            let size = framing.scan(data);
            check(size)?;
            bytes = bytes.saturating_add(data.len());
            if permit.is_none() && (size.is_large() || bytes > SMALL) {
                permit = Some(wait(Arc::clone(own), totals).await?);
                deadline = Instant::now() + WHOLE;
            }
        }
        frames.push_back(Ok(frame));
        // This is enough to receive: the decoder refuses a longer message when it sees the header, and takes no
        // second message.
        if framing.length() > limits::MESSAGE || bytes > 2 * limits::MESSAGE {
            break;
        }
    }
    Ok(Complete {
        body: Body::new(Frames(frames)),
        permit,
    })
}

async fn wait(own: Arc<Own>, totals: &Totals) -> Result<RequestPermit, Status> {
    let permit = RequestPermit::wait(own, &totals.large_requests);
    timeout(PATIENCE, permit).await.map_err(|_| {
        let most = totals.limits().large_requests;
        let message = format!(
            "no room for a request of more than {} KiB: the server receives {most} at a time, one of each connection; \
             try again, or raise `large_requests` in the server's configuration",
            SMALL >> 10
        );
        Failure::new(Code::ResourceExhausted, ErrorKind::NoRoom, message)
            .bound("large_requests", most, 0)
            .into()
    })
}

fn check(size: Size) -> Result<(), Status> {
    if size.weight <= HEAVIEST {
        return Ok(());
    }
    let message = format!(
        "the request has too many entries: decoded, they take more than {} MiB",
        HEAVIEST >> 20
    );
    Err(Failure::invalid(ErrorKind::TooLarge, message).into())
}

fn too_slow() -> Status {
    let message = format!(
        "the request is incomplete after {} s: send it without a break",
        WHOLE.as_secs()
    );
    Failure::new(Code::ResourceExhausted, ErrorKind::TooSlow, message).into()
}

/// A body that has been received.
pub(super) struct Frames(pub(super) VecDeque<Result<Frame<Bytes>, Status>>);

impl HttpBody for Frames {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.pop_front())
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }
}

type Waiting = Pin<Box<dyn Future<Output = Result<RequestPermit, Status>> + Send>>;

/// The body of a request that is a stream of messages. The permit of a large message is returned when the service
/// asks for the next message.
pub(super) struct Messages {
    body: Body,
    framing: Framing,
    own: Arc<Own>,
    totals: Arc<Totals>,
    permit: Option<RequestPermit>,
    /// The wait for a permit, with the frame of the large message that needs it.
    waiting: Option<(Waiting, Frame<Bytes>)>,
    /// Timer for the arrival of the current message.
    over: Option<Pin<Box<Sleep>>>,
}

impl Messages {
    pub(super) fn new(body: Body, framing: Framing, own: Arc<Own>, totals: Arc<Totals>) -> Self {
        Self {
            body,
            framing,
            own,
            totals,
            permit: None,
            waiting: None,
            over: None,
        }
    }

    /// Receives the next frame.
    fn receive(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if !self.framing.is_within() {
            (self.permit, self.over) = (None, None);
        }
        let frame = match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => frame,
            Poll::Ready(end) => return Poll::Ready(end),
            Poll::Pending => {
                if let Some(over) = &mut self.over
                    && over.as_mut().poll(cx).is_ready()
                {
                    return Poll::Ready(Some(Err(too_slow())));
                }
                return Poll::Pending;
            }
        };
        let size = frame
            .data_ref()
            .map_or_else(Size::default, |data| self.framing.scan(data));
        check(size)?;
        if self.framing.is_within() {
            self.over.get_or_insert_with(|| Box::pin(sleep(WHOLE)));
        }
        if !size.is_large() || self.permit.is_some() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let (own, totals) = (Arc::clone(&self.own), Arc::clone(&self.totals));
        let waiting: Waiting = Box::pin(async move { wait(own, &totals).await });
        self.waiting = Some((waiting, frame));
        self.go_on(cx)
    }

    /// Returns the waiting frame once there is a permit.
    fn go_on(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some((waiting, _)) = &mut self.waiting else {
            return Poll::Pending;
        };
        let Poll::Ready(permit) = waiting.as_mut().poll(cx) else {
            return Poll::Pending;
        };
        let frame = self.waiting.take().map(|(_, frame)| Ok(frame));
        self.permit = Some(permit?);
        self.over = Some(Box::pin(sleep(WHOLE)));
        Poll::Ready(frame)
    }
}

impl HttpBody for Messages {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.waiting.is_some() {
            self.go_on(cx)
        } else {
            self.receive(cx)
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.body.is_end_stream()
    }
}
