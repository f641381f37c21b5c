//! Message boundaries in the body of a request: each message follows a flag and four bytes of length (gRPC's
//! "PROTOCOL-HTTP2", Length-Prefixed-Message).

use std::sync::Arc;

use super::sizes::{LIGHT, SMALL};
use super::weight::Scanner;
use crate::calls::interface::{Interface, MessageType};

/// Bytes of the flag and the length.
const HEADER: usize = 5;

/// Position in a body.
#[derive(Debug)]
pub(super) struct Framing {
    interface: Arc<Interface>,
    /// The type of the messages, if the call is of our interface.
    ty: Option<MessageType>,
    header: Vec<u8>,
    scanner: Option<Scanner>,
    /// Length of the current message.
    length: u32,
    /// Bytes of the current message that have not arrived.
    left: u32,
    /// Bytes of the current message that have arrived, with the header.
    bytes: usize,
    /// Upper bound for the heap memory that decoding these bytes takes.
    weight: usize,
}

impl Framing {
    pub(super) fn new(interface: Arc<Interface>, ty: Option<MessageType>) -> Self {
        Self {
            interface,
            ty,
            header: Vec::with_capacity(HEADER),
            scanner: None,
            length: 0,
            left: 0,
            bytes: 0,
            weight: 0,
        }
    }

    /// Whether the start of a message has been scanned, but not yet its end.
    pub(super) fn is_within(&self) -> bool {
        !self.header.is_empty()
    }

    /// Length of the current message, 0 while it is unknown.
    pub(super) fn length(&self) -> usize {
        usize::try_from(self.length).unwrap_or(usize::MAX)
    }

    /// Scans the next bytes. Returns the greatest length and the greatest weight of the messages in them, as far as
    /// they have arrived.
    pub(super) fn scan(&mut self, mut bytes: &[u8]) -> Size {
        let mut largest = Size::default();
        while !bytes.is_empty() {
            let missing = HEADER - self.header.len();
            let wanted = match missing {
                0 => usize::try_from(self.left).unwrap_or(usize::MAX),
                _ => missing,
            };
            let (part, rest) = bytes.split_at(wanted.min(bytes.len()));
            bytes = rest;
            self.bytes = self.bytes.saturating_add(part.len());
            if missing > 0 {
                self.header(part);
            } else {
                self.left -= u32::try_from(part.len()).unwrap_or(self.left);
                let weight = self.scanner.as_mut().map_or(0, |it| it.scan(part));
                self.weight = self.weight.saturating_add(weight);
            }
            largest.bytes = largest.bytes.max(self.bytes);
            largest.weight = largest.weight.max(self.weight);
            if self.header.len() == HEADER && self.left == 0 {
                self.header.clear();
                self.length = 0;
                self.scanner = None;
                (self.bytes, self.weight) = (0, 0);
            }
        }
        largest
    }

    fn header(&mut self, part: &[u8]) {
        self.header.extend_from_slice(part);
        if let [_, length @ ..] = &*self.header
            && let Ok(length) = <[u8; 4]>::try_from(length)
        {
            self.length = u32::from_be_bytes(length);
            self.left = self.length;
            let length = u64::from(self.length);
            self.scanner = self
                .ty
                .map(|ty| Scanner::new(Arc::clone(&self.interface), ty, length));
        }
    }
}

/// Size of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    /// Length as sent, with the header, in bytes.
    pub(super) bytes: usize,
    /// Upper bound for the heap memory of the decoded message, in bytes.
    pub(super) weight: usize,
}

impl Size {
    pub(super) fn is_large(self) -> bool {
        self.bytes > SMALL || self.weight > LIGHT
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::v1::ListProbesRequest;
    use prost::Message as _;

    use super::*;

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[0], &length.to_be_bytes()[..], message].concat()
    }

    #[test]
    fn boundaries_are_found_however_the_bytes_are_split() {
        let message = ListProbesRequest {
            machine: "m".repeat(300),
            ..Default::default()
        };
        let messages = [
            framed(&message.encode_to_vec()),
            framed(&[]),
            framed(&[0xff; 3]),
        ];
        let bytes = messages.concat();
        let interface = Arc::new(Interface::new());
        let ty = interface
            .method("/hvprobe.v1.Probes/ListProbes")
            .map(|it| it.input);
        let mut whole = Framing::new(Arc::clone(&interface), ty);
        let size = whole.scan(&bytes);
        assert_eq!(size.bytes, messages[0].len());
        assert!(size.weight >= 300 && !whole.is_within());
        for part in [1, 2, 7, 100] {
            let mut framing = Framing::new(Arc::clone(&interface), ty);
            let (mut at, mut largest) = (0, Size::default());
            for part in bytes.chunks(part) {
                let size = framing.scan(part);
                largest.bytes = largest.bytes.max(size.bytes);
                largest.weight = largest.weight.max(size.weight);
                at += part.len();
                let ends = [messages[0].len(), messages[0].len() + 5, bytes.len()];
                assert_eq!(framing.is_within(), !ends.contains(&at), "{at}");
            }
            assert_eq!(largest, size);
        }
    }
}
