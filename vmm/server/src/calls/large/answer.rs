//! Answers of unary calls.
//!
//! Invariant: a call whose answer can be long gets a permit before the service sees it. The permit lives as long as
//! the bytes of a large answer, wherever the HTTP/2 library keeps them. So it is released when these bytes have
//! been written to the socket, or dropped at the end of the stream.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use http_body::{Body as _, Frame};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use prost::bytes::Bytes;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::{Code, Status};

use super::request::Frames;
use super::sizes::SMALL;
use crate::bounds::permits::{AnswerPermit, Own, UNREAD};
use crate::bounds::totals::Totals;

/// Waits for the permit of a long answer.
///
/// # Errors
/// When no permit is free for [`UNREAD`].
pub(super) async fn permit(own: &Arc<Own>, totals: &Totals) -> Result<AnswerPermit, Status> {
    let permit = AnswerPermit::wait(Arc::clone(own), &totals.large_answers);
    timeout(UNREAD, permit).await.map_err(|_| {
        let most = totals.limits().large_answers;
        let message = format!(
            "no room for the answer: the server has {most} long answers under way, and one of this connection; try \
             again, or raise `large_answers` in the server's configuration"
        );
        Failure::new(Code::ResourceExhausted, ErrorKind::NoRoom, message)
            .bound("large_answers", most, 0)
            .into()
    })
}

/// Encodes all of `body`. If that takes more than [`SMALL`] bytes, the bytes hold `permit`; otherwise it is
/// released.
pub(super) async fn encoded(mut body: Body, mut permit: AnswerPermit) -> Body {
    let mut frames = VecDeque::new();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        frames.push_back(frame);
    }
    let length = |frame: &Result<Frame<Bytes>, Status>| {
        let data = frame.as_ref().ok().and_then(Frame::data_ref);
        data.map_or(0, Bytes::len)
    };
    if frames.iter().map(length).sum::<usize>() > SMALL {
        permit.start_unread();
        let permit = Arc::new(permit);
        let held = |bytes| {
            let _permit = Arc::clone(&permit);
            Bytes::from_owner(Held { bytes, _permit })
        };
        frames = frames
            .into_iter()
            .map(|frame| frame.map(|frame| frame.map_data(held)))
            .collect();
    }
    Body::new(Frames(frames))
}

/// Bytes of a large answer.
struct Held {
    bytes: Bytes,
    _permit: Arc<AnswerPermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
