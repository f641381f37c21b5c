//! Errors on the wire: a gRPC status for people, with an [`ErrorDetail`] for programs, and standard details for
//! programs that do not know this server: `google.rpc.ErrorInfo`, and `google.rpc.BadRequest` if a field of the
//! request is to blame.
//!
//! Invariant: every error fits into the headers that every client accepts; a long text is shortened.

use std::collections::HashMap;
use std::fmt;

use prost::Message;
use prost_types::Any;
use tonic::{Code, Status};
use tonic_types::pb::bad_request::FieldViolation;
use tonic_types::pb::{BadRequest, ErrorInfo};

use crate::v1::{self, ErrorDetail, ErrorKind};

/// Prefix of the names of packed messages (`google.protobuf.Any.type_url`).
const TYPES: &str = "type.googleapis.com";
/// Domain of our reasons (`google.rpc.ErrorInfo.domain`).
const DOMAIN: &str = "hvprobe";
/// Prefix of the names of [`ErrorKind`]'s values, which is left out of a reason.
const KIND: &str = "ERROR_KIND_";

/// Maximum length of an error's text, in bytes. The text is in the headers three times, once percent-encoded with
/// up to three bytes for each byte. Many clients accept at most 8 KiB of headers (gRPC's `max_metadata_size`), and
/// show no reason at all if there are more.
const TEXT: usize = 1000;
/// Maximum total length of an error's candidates, in bytes.
const OFFERED: usize = 700;

/// An error that is to be sent to a client.
#[derive(Debug)]
pub struct Failure {
    code: Code,
    message: String,
    detail: ErrorDetail,
    also: Box<Also>,
}

/// Details for programs that do not know [`ErrorDetail`].
#[derive(Debug, Default)]
struct Also {
    /// Path of the request's field that is to blame.
    field: Option<String>,
    /// Metadata of the reason.
    metadata: HashMap<String, String>,
}

impl Failure {
    /// Creates an error with this code, for this reason.
    pub fn new(code: Code, kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: ErrorDetail {
                kind: kind.into(),
                ..Default::default()
            },
            also: Box::default(),
        }
    }

    /// Creates the error for a request that no server could carry out.
    pub fn invalid(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, kind, message)
    }

    /// Sets the path of the request's field that is to blame.
    #[must_use]
    pub fn on(mut self, field: impl Into<String>) -> Self {
        self.also.field = Some(field.into());
        self
    }

    /// Sets the server's limit that the request exceeds: its name, its value `most`, and how much of it is `left`.
    #[must_use]
    pub fn bound(mut self, limit: &str, most: impl fmt::Display, left: impl fmt::Display) -> Self {
        let metadata = [
            ("limit", limit.to_owned()),
            ("most", most.to_string()),
            ("left", left.to_string()),
        ];
        let metadata = metadata.map(|(name, value)| (name.to_owned(), value));
        self.also.metadata.extend(metadata);
        self
    }

    /// Sets the index of the batch's entry that is to blame.
    #[must_use]
    pub fn at_index(mut self, index: usize) -> Self {
        self.detail.index = u32::try_from(index).ok();
        self
    }

    /// Sets the column in the definition at which the error is.
    #[must_use]
    pub fn at_column(self, column: usize) -> Self {
        self.at_known(u32::try_from(column).ok())
    }

    /// Sets the column in the definition at which the error is, if it is known. Otherwise keeps the column that was
    /// set before.
    #[must_use]
    pub fn at_known(mut self, column: Option<u32>) -> Self {
        self.detail.column = column.or(self.detail.column);
        self
    }

    /// Sets what the client can do about the error, and the condition `when` to wait for; empty if there is none.
    #[must_use]
    pub fn with(mut self, remedy: v1::Remedy, when: &str) -> Self {
        self.detail.remedy = remedy.into();
        when.clone_into(&mut self.detail.when);
        self
    }

    /// Sets the candidates: names that the client may have meant. Keeps only the first ones, as many as fit.
    #[must_use]
    pub fn offering(mut self, candidates: impl IntoIterator<Item = String>) -> Self {
        let mut left = OFFERED;
        let fits = |candidate: &String| {
            let next = left.checked_sub(candidate.len());
            left = next.unwrap_or(0);
            next.is_some()
        };
        self.detail.candidates = candidates.into_iter().take_while(fits).collect();
        self
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let Failure {
            code,
            message,
            detail,
            also,
        } = failure;
        let message = shortened(message);
        let Also {
            field,
            mut metadata,
        } = *also;
        let reason = detail.kind().as_str_name();
        let numbers = [("index", detail.index), ("column", detail.column)];
        let numbers = numbers
            .into_iter()
            .filter_map(|(name, number)| Some((name.to_owned(), number?.to_string())));
        metadata.extend(numbers);
        let info = ErrorInfo {
            reason: reason.strip_prefix(KIND).unwrap_or(reason).to_owned(),
            domain: DOMAIN.to_owned(),
            metadata,
        };
        let mut details = vec![
            packed("hvprobe.v1.ErrorDetail", &detail),
            packed("google.rpc.ErrorInfo", &info),
        ];
        details.extend(field.map(|field| {
            let violation = FieldViolation {
                field,
                description: message.clone(),
                reason: info.reason.clone(),
                ..FieldViolation::default()
            };
            let bad = BadRequest {
                field_violations: vec![violation],
            };
            packed("google.rpc.BadRequest", &bad)
        }));
        let packed = tonic_types::Status {
            code: code.into(),
            message: message.clone(),
            details,
        };
        Self::with_details(code, message, packed.encode_to_vec().into())
    }
}

/// Removes the middle of `text` if it is too long. Its beginning says what went wrong, and its end says why.
fn shortened(text: String) -> String {
    if text.len() <= TEXT {
        return text;
    }
    let mark = format!(" [… {} bytes …] ", text.len());
    let half = (TEXT - mark.len()) / 2;
    let head = text.floor_char_boundary(half);
    let tail = text.ceil_char_boundary(text.len() - half);
    [&text[..head], &mark, &text[tail..]].concat()
}

/// Packs `message`, whose type is called `name`, as a detail.
fn packed(name: &str, message: &impl Message) -> Any {
    Any {
        type_url: format!("{TYPES}/{name}"),
        value: message.encode_to_vec(),
    }
}

/// Returns the [`ErrorDetail`] in the error `status` of a server, if there is one.
#[must_use]
pub fn detail(status: &Status) -> Option<ErrorDetail> {
    let packed = tonic_types::Status::decode(status.details()).ok()?;
    let detail = packed.details.first()?;
    ErrorDetail::decode(detail.value.as_slice()).ok()
}

#[cfg(test)]
mod tests {
    use tonic_types::StatusExt as _;

    use super::*;

    #[test]
    fn detail_and_reason_of_an_error_are_found_in_its_status() {
        let failure = Failure::new(Code::NotFound, ErrorKind::UnknownSymbol, "no such symbol")
            .at_index(3)
            .at_column(2)
            .with(v1::Remedy::NotNow, "the module is loaded");
        let status = Status::from(failure);
        assert_eq!(
            (status.code(), status.message()),
            (Code::NotFound, "no such symbol")
        );
        let detail = detail(&status).unwrap();
        assert_eq!(detail.kind(), ErrorKind::UnknownSymbol);
        assert_eq!((detail.index, detail.column), (Some(3), Some(2)));
        assert_eq!(
            (detail.remedy(), &*detail.when),
            (v1::Remedy::NotNow, "the module is loaded")
        );
        for other in [
            Status::not_found("x"),
            Status::with_details(Code::Ok, "", vec![7].into()),
        ] {
            assert_eq!(super::detail(&other), None);
        }
    }

    #[test]
    fn reasons_are_of_the_form_that_is_asked_for() {
        for number in 0..128 {
            let Ok(kind) = ErrorKind::try_from(number) else {
                continue;
            };
            let status = Status::from(Failure::new(Code::Internal, kind, ""));
            let reason = status.get_details_error_info().unwrap().reason;
            // As google/rpc/error_details.proto requires.
            let plain =
                |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
            assert!(reason.len() < 64 && reason.bytes().all(plain), "{reason}");
            assert!(
                !reason.starts_with(KIND) && !reason.ends_with('_'),
                "{reason}"
            );
        }
    }

    #[test]
    fn the_longest_error_fits_into_the_headers_that_every_client_takes() {
        for unit in ["a", "\u{1}", "ä", "語", "😀"] {
            let text = format!("began: {}: ended", unit.repeat(4000));
            let failure = Failure::new(Code::InvalidArgument, ErrorKind::Definition, text)
                .at_index(16_383)
                .at_column(1023)
                .on("probes[16383].definition")
                .bound("subscribers_per_machine", u64::MAX, u64::MAX)
                .offering((0..100).map(|_| unit.repeat(100)))
                .with(
                    v1::Remedy::NotNow,
                    "the guest has unregistered its own kprobe",
                );
            let status = Status::from(failure);
            assert!(status.message().starts_with("began: "));
            assert!(status.message().ends_with(": ended"));
            let headers = status.into_http::<()>().into_parts().0.headers;
            // As RFC 7541 section 4.1 counts them.
            let each = headers
                .iter()
                .map(|(name, value)| name.as_str().len() + value.len() + 32);
            let bytes = each.sum::<usize>();
            assert!(bytes <= 8 << 10, "{unit}: {bytes} bytes");
        }
    }

    #[test]
    fn what_fits_is_sent_as_it_is() {
        assert_eq!(shortened("a".repeat(TEXT)), "a".repeat(TEXT));
        let failure = Failure::new(Code::NotFound, ErrorKind::UnknownSymbol, "");
        let near = ["vfs_read".to_owned(), "vfs_readv".to_owned()];
        let status = Status::from(failure.offering(near.clone()));
        assert_eq!(detail(&status).unwrap().candidates, near);
    }
}
