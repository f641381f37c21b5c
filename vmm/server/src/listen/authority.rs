//! Rewrites the names of unix sockets so that the HTTP/2 library accepts them.
//!
//! A client names the server it wants in `:authority`. gRPC's own libraries (C++, Python, Ruby, Java) put the path
//! of a unix socket there, either unchanged or percent-encoded. By RFC 3986 that is no authority, and `h2` refuses
//! each such request. This server does not use the name, so each `/` and `%` in it is replaced by `-` as it
//! arrives.
//!
//! Invariants: no other byte is changed, and no length. Frames (RFC 9113, 4.1) and fields (RFC 7541, 6) are parsed
//! only as far as necessary to find the name. From the first byte that cannot be parsed, everything is passed on
//! unchanged, for the library to refuse. Compressed names (RFC 7541, 5.2) are left alone: those libraries send
//! short strings uncompressed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Length of the connection preface (RFC 9113, 3.4), in bytes.
const PREFACE: usize = 24;
/// Length of a frame header, in bytes.
const HEAD: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Bytes that a frame with the flag PRIORITY has before its fields.
const PRIORITY_BYTES: usize = 5;
/// Name of the field.
const NAME: &[u8] = b":authority";
/// Index of the field in HPACK's static table (RFC 7541, appendix A).
const AUTHORITY: u32 = 1;

/// A connection on which names are rewritten as they arrive.
#[derive(Debug)]
pub(crate) struct Named<S> {
    stream: S,
    names: Names,
}

impl<S> Named<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            names: Names::default(),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Named<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Some(new) = buf.filled_mut().get_mut(before..) {
            self.names.pass(new);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Named<S> {
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
        slices: &[io::IoSlice<'_>],
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

/// State of the parser of frames.
#[derive(Clone, Copy, Debug)]
enum Frame {
    /// Before this many bytes that are passed on unchanged.
    Other(usize),
    /// In a frame header, of which this many bytes have arrived.
    Head([u8; HEAD], usize),
    /// Before the byte with the length of the padding; `left` bytes of the frame are left.
    Padding { left: usize, flags: u8 },
    /// In the fields of a frame: `before` other bytes come first, then `left` bytes of fields, then `padding`
    /// bytes.
    Fields {
        before: usize,
        left: usize,
        padding: usize,
    },
    /// After bytes that cannot be parsed.
    Lost,
}

/// State of the parser of fields. A field may continue in the next frame.
#[derive(Clone, Copy, Debug)]
enum Field {
    Start,
    /// In a number of several bytes.
    Number {
        value: u32,
        shift: u32,
        of: Number,
    },
    /// Before the length of a string.
    Length(Text),
    Text(Text, u32),
}

/// Meaning of a number.
#[derive(Clone, Copy, Debug)]
enum Number {
    /// The number is the whole field.
    Field,
    /// Index of a field's name, or zero.
    Name,
    Length(Text),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    /// A name that equals [`NAME`] so far, of which this many bytes are still to come.
    Name(usize),
    OtherName,
    Value,
    Authority,
}

/// Parser that rewrites the names in the bytes that a client sends.
#[derive(Debug)]
struct Names {
    frame: Frame,
    field: Field,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            frame: Frame::Other(PREFACE),
            field: Field::Start,
        }
    }
}

impl Names {
    /// Parses and rewrites the next bytes.
    fn pass(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let Some((done, next)) = self.step(bytes) else {
                self.frame = Frame::Lost;
                return;
            };
            self.frame = next;
            bytes = bytes.get_mut(done..).unwrap_or_default();
        }
    }

    /// Parses the bytes that belong to the current state. Returns how many there were, and the next state; `None`
    /// if they cannot be parsed.
    fn step(&mut self, bytes: &mut [u8]) -> Option<(usize, Frame)> {
        let here = bytes.len();
        Some(match self.frame {
            Frame::Other(left) => {
                let done = left.min(here);
                (done, Frame::of_other(left - done))
            }
            Frame::Head(mut head, has) => {
                let done = (HEAD - has).min(here);
                head.get_mut(has..has + done)?
                    .copy_from_slice(bytes.get(..done)?);
                let next = match has + done {
                    HEAD => Frame::after(head)?,
                    has => Frame::Head(head, has),
                };
                (done, next)
            }
            Frame::Padding { left, flags } => {
                let padding = usize::from(*bytes.first()?);
                (1, Frame::fields(left.checked_sub(1)?, flags, padding)?)
            }
            Frame::Fields {
                before,
                left,
                padding,
            } if before > 0 => {
                let done = before.min(here);
                let before = before - done;
                let next = Frame::Fields {
                    before,
                    left,
                    padding,
                };
                (done, next)
            }
            Frame::Fields {
                before,
                left,
                padding,
            } => {
                let done = left.min(here);
                self.fields(bytes.get_mut(..done)?)?;
                let left = left - done;
                let next = match left {
                    0 => Frame::of_other(padding),
                    _ => Frame::Fields {
                        before,
                        left,
                        padding,
                    },
                };
                (done, next)
            }
            Frame::Lost => (here, Frame::Lost),
        })
    }

    fn fields(&mut self, mut bytes: &mut [u8]) -> Option<()> {
        while let Some(&first) = bytes.first() {
            let mut done = 1;
            self.field = match self.field {
                Field::Start if first & 0x80 != 0 => number(first, 7, Number::Field),
                Field::Start if first & 0x40 != 0 => number(first, 6, Number::Name),
                Field::Start if first & 0x20 != 0 => number(first, 5, Number::Field),
                Field::Start => number(first, 4, Number::Name),
                Field::Number { value, shift, of } => {
                    let more = u32::from(first & 0x7f).checked_shl(shift)?;
                    let value = value.checked_add(more)?;
                    // No number that has a meaning here has more than four such bytes.
                    let shift = Some(shift + 7).filter(|shift| *shift <= 28)?;
                    match first & 0x80 {
                        0 => of.is(value),
                        _ => Field::Number { value, shift, of },
                    }
                }
                Field::Length(text) => {
                    let is_plain = first & 0x80 == 0;
                    let text = if is_plain { text } else { text.compressed() };
                    number(first, 7, Number::Length(text))
                }
                Field::Text(Text::Name(missing), left) => {
                    let expected = NAME.len().checked_sub(missing).and_then(|at| NAME.get(at));
                    let text = match expected {
                        Some(expected) if *expected == first => Text::Name(missing - 1),
                        _ => Text::OtherName,
                    };
                    text.left(left - 1)
                }
                Field::Text(text, left) => {
                    done = usize::try_from(left).ok()?.min(bytes.len());
                    if text == Text::Authority {
                        for byte in bytes.get_mut(..done)? {
                            if matches!(byte, b'/' | b'%') {
                                *byte = b'-';
                            }
                        }
                    }
                    text.left(left - u32::try_from(done).ok()?)
                }
            };
            bytes = bytes.get_mut(done..)?;
        }
        Some(())
    }
}

impl Frame {
    fn of_other(left: usize) -> Self {
        match left {
            0 => Self::Head([0; HEAD], 0),
            _ => Self::Other(left),
        }
    }

    /// Returns the state after a frame header.
    fn after(head: [u8; HEAD]) -> Option<Self> {
        let [high, middle, low, kind, flags, ..] = head;
        let left = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        match kind {
            HEADERS if flags & PADDED != 0 => Some(Self::Padding { left, flags }),
            HEADERS => Self::fields(left, flags, 0),
            CONTINUATION => Self::fields(left, 0, 0),
            _ => Some(Self::of_other(left)),
        }
    }

    /// Returns the state before the fields in the `left` bytes of a frame.
    fn fields(left: usize, flags: u8, padding: usize) -> Option<Self> {
        let before = if flags & PRIORITY == 0 {
            0
        } else {
            PRIORITY_BYTES
        };
        Some(Self::Fields {
            before,
            left: left.checked_sub(before)?.checked_sub(padding)?,
            padding,
        })
    }
}

/// Parses a number whose first byte is `first`, of which `bits` bits belong to the number (RFC 7541, 5.1).
fn number(first: u8, bits: u32, of: Number) -> Field {
    let most = (1 << bits) - 1;
    match u32::from(first) & most {
        value if value < most => of.is(value),
        value => Field::Number {
            value,
            shift: 0,
            of,
        },
    }
}

impl Number {
    /// Returns the state after a number that has this meaning and is `value`.
    fn is(self, value: u32) -> Field {
        match (self, value) {
            (Self::Field, _) => Field::Start,
            (Self::Name, 0) => Field::Length(Text::Name(NAME.len())),
            (Self::Name, AUTHORITY) => Field::Length(Text::Authority),
            (Self::Name, _) => Field::Length(Text::Value),
            (Self::Length(text), left) => text.left(left),
        }
    }
}

impl Text {
    /// Returns the kind of a compressed string, which is passed on unchanged.
    fn compressed(self) -> Self {
        match self {
            Self::Name(_) | Self::OtherName => Self::OtherName,
            Self::Value | Self::Authority => Self::Value,
        }
    }

    /// Returns the state with `left` bytes of the string to come.
    fn left(self, left: u32) -> Field {
        match (left, self) {
            (0, Self::Name(0)) => Field::Length(Self::Authority),
            (0, Self::Name(_) | Self::OtherName) => Field::Length(Self::Value),
            (0, Self::Value | Self::Authority) => Field::Start,
            _ => Field::Text(self, left),
        }
    }
}

#[cfg(test)]
mod tests;
