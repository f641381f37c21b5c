//! Connections of clients, and the admission of their calls.
//!
//! Invariant: on a connection whose client is not authenticated, every call to any service must have the token. The
//! token is checked before anything else in the call. A call without a known connection is refused.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use hvprobe_proto::Failure;
use hvprobe_proto::Token;
use hvprobe_proto::v1::ErrorKind;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tonic::transport::server::Connected;
use tonic::{Code, Request, Status};

use super::caller::{self, Caller, Credential};
use super::silent::Beginning;
use crate::bounds::permits::Own;

/// Which calls of a connection are admitted.
#[derive(Clone, Debug)]
pub(crate) enum Admission {
    /// All: the client is authenticated.
    Known,
    /// Those with this token.
    Token(Arc<Token>),
    /// None: each call is answered with this error.
    Refused(Arc<Status>),
}

/// The connection of a call.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    /// Number of the connection.
    pub(crate) number: u64,
    pub(crate) admission: Admission,
    /// State that the calls of the connection share.
    pub(crate) own: Arc<Own>,
}

/// A bidirectional stream of bytes.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection of any kind.
pub(crate) struct Connection {
    number: u64,
    stream: Box<dyn Stream>,
    admission: Admission,
    own: Arc<Own>,
    /// Present until the client has sent its preface.
    beginning: Option<Beginning>,
    /// The permit of the connection, once the client has sent its preface. Until then, `beginning` has it.
    place: Option<OwnedSemaphorePermit>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("admission", &self.admission)
            .field("beginning", &self.beginning)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// Creates the connection of an authenticated client.
    pub(crate) fn known(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            stream: Box::new(stream),
            admission: Admission::Known,
            own: Arc::default(),
            beginning: None,
            place: None,
        }
    }

    /// Creates the connection of a client that has to send `token`.
    pub(crate) fn with_token(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        token: Arc<Token>,
    ) -> Self {
        Self {
            admission: Admission::Token(token),
            ..Self::known(stream)
        }
    }

    /// Creates a connection whose calls are all refused with `why`.
    pub(crate) fn refused(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        why: Status,
    ) -> Self {
        Self {
            admission: Admission::Refused(Arc::new(why)),
            ..Self::known(stream)
        }
    }

    /// Sets the state in which the connection is until its client has sent the preface. From then on, the
    /// connection cannot lose its permit.
    pub(crate) fn beginning(mut self, beginning: Beginning) -> Self {
        self.beginning = Some(beginning);
        self
    }
}

impl Connected for Connection {
    type ConnectInfo = Link;

    fn connect_info(&self) -> Link {
        Link {
            number: self.number,
            admission: self.admission.clone(),
            own: Arc::clone(&self.own),
        }
    }
}

/// Refuses a call that is not admitted, and adds the [`Caller`] to one that is.
pub(crate) fn admit(mut call: Request<()>) -> Result<Request<()>, Status> {
    let refused = |why: &str| Failure::new(Code::Unauthenticated, ErrorKind::Unauthenticated, why);
    let link = call
        .extensions()
        .get::<Link>()
        .ok_or_else(caller::unknown)?;
    let credential = match &link.admission {
        Admission::Known => Credential::Connection,
        Admission::Refused(why) => return Err(Status::clone(why)),
        Admission::Token(token) => match call.metadata().get("authorization") {
            Some(shown) if token.admits(shown.as_bytes()) => Credential::Token,
            Some(_) => return Err(refused("this is not the token of this server").into()),
            None => {
                let why = "this server's token is needed here: send `authorization: Bearer TOKEN`";
                return Err(refused(why).into());
            }
        },
    };
    let caller = Caller {
        connection: link.number,
        credential,
    };
    call.extensions_mut().insert(caller);
    Ok(call)
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.own.is_overdue() {
            let why = "the client did not read an answer in time";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
        }
        let Some(beginning) = &mut this.beginning else {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        };
        // Bytes that have arrived count even if the deadline passed before this poll.
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        match beginning.came(buf.filled().len().saturating_sub(before)) {
            Poll::Pending if polled.is_pending() => beginning.poll(cx)?,
            Poll::Pending => {}
            Poll::Ready(kept) => {
                this.place = Some(kept?);
                this.beginning = None;
            }
        }
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a call with this admission and these `authorization` headers. Returns the credential of the client if
    /// the call is admitted, otherwise the code of the error.
    fn admitted(admission: Option<Admission>, authorization: &[&str]) -> Result<Credential, Code> {
        let mut call = Request::new(());
        if let Some(admission) = admission {
            call.extensions_mut().insert(Link {
                number: 7,
                admission,
                own: Arc::default(),
            });
        }
        for shown in authorization {
            let shown = shown.parse().unwrap();
            call.metadata_mut().append("authorization", shown);
        }
        let caller = admit(call).and_then(|call| Caller::of(&call));
        let caller = caller.map_err(|status| status.code())?;
        assert_eq!(caller.connection, 7);
        Ok(caller.credential)
    }

    #[test]
    fn known_client_needs_no_token() {
        let known = |authorization| admitted(Some(Admission::Known), authorization);
        assert_eq!(known(&[]), Ok(Credential::Connection));
        let other = ["Bearer of something else"];
        assert_eq!(known(&other), Ok(Credential::Connection));
    }

    #[test]
    fn unknown_client_needs_the_token() {
        let token = || "0123456789abcdef".parse().unwrap();
        let guarded = || Some(Admission::Token(Arc::new(token())));
        let right = ["Bearer 0123456789abcdef"];
        assert_eq!(admitted(guarded(), &right), Ok(Credential::Token));
        for wrong in [
            &[][..],
            &["Bearer fedcba9876543210"],
            &["Bearer fedcba9876543210", "Bearer 0123456789abcdef"],
        ] {
            let result = admitted(guarded(), wrong);
            assert_eq!(result, Err(Code::Unauthenticated), "{wrong:?}");
        }
    }

    #[test]
    fn call_from_nowhere_is_refused() {
        let result = admitted(None, &["Bearer 0123456789abcdef"]);
        assert_eq!(result, Err(Code::Unauthenticated));
    }

    #[tokio::test]
    async fn connections_have_different_numbers() {
        let (end, other) = tokio::io::duplex(1);
        let links = [end, other].map(|end| Connection::known(end).connect_info());
        assert_ne!(links[0].number, links[1].number);
    }
}
