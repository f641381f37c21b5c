//! Streams that end when their call's deadline is over.
//!
//! A client tells how long it waits for a call (`grpc-timeout`, "PROTOCOL-HTTP2" of gRPC). The library
//! looks at that until a stream has begun; from then on it is looked at here.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Sleep, sleep};
use tokio_stream::Stream;
use tonic::Status;
use tonic::metadata::MetadataMap;

/// What a stream's client waits for, and until when.
#[derive(Debug)]
pub(crate) struct Until<S> {
    /// Nothing when the deadline is over: whoever makes messages is to see that.
    messages: Option<S>,
    over: Option<Pin<Box<Sleep>>>,
}

impl<S> Until<S> {
    /// `messages` until the deadline that a call with this `metadata` has.
    pub(crate) fn deadline(metadata: &MetadataMap, messages: S) -> Self {
        Self {
            messages: Some(messages),
            over: timeout(metadata).map(|timeout| Box::pin(sleep(timeout))),
        }
    }
}

impl<T, S: Stream<Item = Result<T, Status>> + Unpin> Stream for Until<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let this = &mut *self;
        let Some(messages) = &mut this.messages else {
            return Poll::Ready(None);
        };
        if let Some(over) = &mut this.over
            && over.as_mut().poll(context).is_ready()
        {
            this.messages = None;
            let why = "the deadline of the stream is over";
            return Poll::Ready(Some(Err(Status::deadline_exceeded(why))));
        }
        Pin::new(messages).poll_next(context)
    }
}

/// How long a call may take, if its client says so in a way that can be read: at most eight digits, and a
/// unit.
fn timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
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
mod tests {
    use tokio_stream::StreamExt as _;
    use tonic::Code;

    use super::*;

    fn with(text: &'static str) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", text.parse().expect("a value"));
        metadata
    }

    #[test]
    fn timeouts_are_read_as_they_are_written() {
        let cases = [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("45m", Some(Duration::from_millis(45))),
            ("6u", Some(Duration::from_micros(6))),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("999999999n", None),
            ("S", None),
            ("", None),
            ("-1S", None),
            ("1s", None),
        ];
        for (text, expected) in cases {
            assert_eq!(timeout(&with(text)), expected, "{text}");
        }
        assert_eq!(timeout(&MetadataMap::new()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn stream_ends_with_its_deadline_and_lets_go_of_its_messages() {
        let (to, from) = tokio::sync::mpsc::channel(1);
        let from = tokio_stream::wrappers::ReceiverStream::new(from);
        let mut stream = Until::deadline(&with("1S"), from);
        to.send(Ok(1)).await.expect("somebody to take it");
        assert_eq!(stream.next().await.map(Result::ok), Some(Some(1)));
        let over = stream.next().await.expect("an end").unwrap_err();
        assert_eq!(over.code(), Code::DeadlineExceeded);
        assert!(to.is_closed());
        assert!(stream.next().await.is_none());
    }
}
