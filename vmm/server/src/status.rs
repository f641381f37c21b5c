//! Errors on the wire: a gRPC status for people, with an [`ErrorDetail`] for programs, and standard details for
//! programs that do not know this server: `google.rpc.ErrorInfo`, and `google.rpc.BadRequest` if a field of the
//! request is to blame.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;

use hvprobe_engine::{ChangeError, Refused, RegisterError, Remedy, StopError};
use hvprobe_linux::symbols::LookupError;
use hvprobe_proto::v1::{self, ErrorDetail, ErrorKind};
use prost::Message;
use prost_types::Any;
use tonic::{Code, Status};
use tonic_types::pb::bad_request::FieldViolation;
use tonic_types::pb::{BadRequest, ErrorInfo};

/// Prefix of the names of packed messages (`google.protobuf.Any.type_url`).
const TYPES: &str = "type.googleapis.com";
/// Domain of our reasons (`google.rpc.ErrorInfo.domain`).
const DOMAIN: &str = "hvprobe";
/// Prefix of a reason in our own interface.
const KIND: &str = "ERROR_KIND_";

/// Maximum length of an error's text, and of its candidates, in bytes. The text is in the headers three times,
/// once with up to three bytes for each byte. Many clients take 8 KiB of headers and no more (gRPC's
/// `max_metadata_size`), and have no reason at all to show if there are more.
const TEXT: usize = 1000;
const OFFERED: usize = 700;

/// An error that is to be sent to a client.
#[derive(Debug)]
pub(crate) struct Failure {
    code: Code,
    message: String,
    detail: ErrorDetail,
    also: Box<Also>,
}

/// Details for programs that do not know [`ErrorDetail`].
#[derive(Debug, Default)]
struct Also {
    /// Path of the field of the request that is to blame.
    field: Option<String>,
    /// Metadata of the reason.
    metadata: HashMap<String, String>,
}

impl Failure {
    pub(crate) fn new(code: Code, kind: ErrorKind, message: impl Into<String>) -> Self {
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
    pub(crate) fn invalid(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, kind, message)
    }

    /// Sets the path of the field of the request that is to blame.
    pub(crate) fn on(mut self, field: impl Into<String>) -> Self {
        self.also.field = Some(field.into());
        self
    }

    /// Sets the limit of the server that is in the way, its value, and what is left of it.
    pub(crate) fn bound(
        mut self,
        limit: &str,
        most: impl fmt::Display,
        left: impl fmt::Display,
    ) -> Self {
        let metadata = [
            ("limit", limit.to_owned()),
            ("most", most.to_string()),
            ("left", left.to_string()),
        ];
        let metadata = metadata.map(|(name, value)| (name.to_owned(), value));
        self.also.metadata.extend(metadata);
        self
    }

    /// Sets the entry of the batch that is to blame.
    pub(crate) fn at_index(mut self, index: usize) -> Self {
        self.detail.index = u32::try_from(index).ok();
        self
    }

    /// Sets the character of the definition that is to blame.
    pub(crate) fn at_column(self, column: usize) -> Self {
        self.at_known(u32::try_from(column).ok())
    }

    /// Sets the character of the definition that is to blame, if it is known.
    pub(crate) fn at_known(mut self, column: Option<u32>) -> Self {
        self.detail.column = column.or(self.detail.column);
        self
    }

    /// Sets what can be done about it.
    fn with(mut self, can: Remedy) -> Self {
        let (remedy, when) = remedy(can);
        self.detail.remedy = remedy.into();
        when.clone_into(&mut self.detail.when);
        self
    }

    /// Sets the candidates: what could have been meant.
    pub(crate) fn offering(mut self, candidates: impl IntoIterator<Item = String>) -> Self {
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

/// Removes the middle of `text` if it is too long: what went wrong is said first, and why last.
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

/// Packs a message of this type as a detail.
fn packed(name: &str, message: &impl Message) -> Any {
    Any {
        type_url: format!("{TYPES}/{name}"),
        value: message.encode_to_vec(),
    }
}

/// Returns `error` and its causes in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Returns the error for a place that cannot be probed; `message` says of which probe and why.
pub(crate) fn refused(message: String, why: &Refused) -> Failure {
    match why {
        Refused::Symbol(LookupError::Unknown { near, .. }) | Refused::NoMatch { near, .. } => {
            Failure::new(Code::NotFound, ErrorKind::UnknownSymbol, message)
                .offering(near.iter().cloned())
        }
        Refused::Symbol(LookupError::Ambiguous { at, .. }) => {
            Failure::invalid(ErrorKind::AmbiguousSymbol, message)
                .offering(at.iter().map(ToString::to_string))
        }
        Refused::Argument(error) => {
            Failure::invalid(ErrorKind::Definition, message).at_column(error.column)
        }
        Refused::TooManyProbes { there, max } => Failure::new(
            Code::ResourceExhausted,
            ErrorKind::TooManyProbes,
            message,
        )
        .bound("probes_per_machine", max, max.saturating_sub(*there)),
        _ => {
            let code = match why.remedy() {
                Remedy::NotNow(_) => Code::FailedPrecondition,
                Remedy::Never | Remedy::WrongRequest => Code::InvalidArgument,
            };
            Failure::new(code, ErrorKind::Refused, message)
        }
    }
    .with(why.remedy())
}

/// Converts what can be done about a refusal, and what to wait for.
pub(crate) fn remedy(remedy: Remedy) -> (v1::Remedy, &'static str) {
    match remedy {
        Remedy::Never => (v1::Remedy::Never, ""),
        Remedy::NotNow(when) => (v1::Remedy::NotNow, when),
        Remedy::WrongRequest => (v1::Remedy::WrongRequest, ""),
    }
}

/// Converts the error of a registration for clients.
pub(crate) fn register_error(machine: &str, error: &RegisterError) -> Status {
    let refused_at = |index: usize, column: Option<u32>, why| {
        let failure = refused(chain(error), why).at_index(index);
        let failure = failure.at_known(column);
        failure.on(format!("probes[{index}].definition")).into()
    };
    match error {
        RegisterError::Refused {
            index,
            column,
            source,
            ..
        } => refused_at(*index, *column, source),
        RegisterError::SomeRefused { index, first, .. } => {
            refused_at(*index, first.column, &first.why)
        }
        RegisterError::Unplanted { source } => refused(chain(error), source).into(),
        RegisterError::Spec { index, .. } => Failure::invalid(ErrorKind::BadActions, chain(error))
            .at_index(*index)
            .on(format!("probes[{index}]"))
            .into(),
        RegisterError::Stop(stop) => stop_error(machine, stop),
    }
}

/// Converts the error of a change of probes for clients.
pub(crate) fn change_error(machine: &str, error: &ChangeError) -> Status {
    match error {
        ChangeError::NoSuchProbe { index, .. } => {
            Failure::new(Code::NotFound, ErrorKind::NoSuchProbe, chain(error))
                .at_index(*index)
                .on(format!("ids[{index}]"))
                .into()
        }
        ChangeError::Refused { source, .. } => refused(chain(error), source).into(),
        ChangeError::Stop(stop) => stop_error(machine, stop),
    }
}

/// Converts the error of stopping the virtual CPUs of a machine for clients.
pub(crate) fn stop_error(machine: &str, error: &StopError) -> Status {
    match error {
        StopError::Ended => ended(machine),
        StopError::Unresponsive { .. } => {
            Failure::new(Code::Internal, ErrorKind::Host, chain(error)).into()
        }
    }
}

/// Returns the error that the machine `name` is still being booted.
pub(crate) fn booting(name: &str) -> Status {
    Failure::new(
        Code::Unavailable,
        ErrorKind::MachineBooting,
        format!("machine `{name}` is being booted: try again when it is"),
    )
    .into()
}

/// Returns the error that the server is stopping and begins nothing new.
pub(crate) fn stopping() -> Status {
    let kind = ErrorKind::ServerStopping;
    Failure::new(Code::Unavailable, kind, "the server is stopping").into()
}

/// Returns the error that the deadline of the call has passed.
pub(crate) fn over_deadline() -> Status {
    let kind = ErrorKind::DeadlineExceeded;
    let why = "the deadline of the call is over";
    Failure::new(Code::DeadlineExceeded, kind, why).into()
}

/// Returns the error for a message that comes in the wrong place in a client's stream.
pub(crate) fn out_of_order(message: &str) -> Status {
    Failure::invalid(ErrorKind::BadStream, message).into()
}

/// Returns the error that the machine `name` has ended.
pub(crate) fn ended(name: &str) -> Status {
    Failure::new(
        Code::FailedPrecondition,
        ErrorKind::MachineEnded,
        format!("machine `{name}` has ended"),
    )
    .into()
}

/// Returns the error that a part of the server has panicked. The panic has been printed.
pub(crate) fn broken(part: impl fmt::Display) -> Status {
    Status::internal(format!("hvprobe is broken: {part} panicked"))
}

#[cfg(test)]
pub(crate) mod tests {
    use hvprobe_arch::Gva;
    use tonic_types::StatusExt as _;

    use super::*;

    /// Returns the detail of an error.
    pub(crate) fn detail(status: &Status) -> ErrorDetail {
        let packed = tonic_types::Status::decode(status.details()).unwrap();
        assert_eq!(packed.message, status.message());
        assert_eq!(packed.code, i32::from(status.code()));
        ErrorDetail::decode(packed.details[0].value.as_slice()).unwrap()
    }

    /// Returns the standard details of an error, which every client knows.
    pub(crate) fn info(status: &Status) -> tonic_types::ErrorInfo {
        status.get_details_error_info().unwrap()
    }

    /// Returns the code and the detail of `failure` that a client sees.
    fn seen(failure: Failure) -> (Code, ErrorDetail) {
        let status = Status::from(failure);
        (status.code(), detail(&status))
    }

    #[test]
    fn detail_says_where_and_what_could_have_been_meant() {
        let why = Refused::Symbol(LookupError::Unknown {
            name: "vfs_raed".into(),
            near: vec!["vfs_read".into()],
        });
        let (code, detail) = seen(refused(chain(&why), &why).at_index(3).at_column(2));
        assert_eq!(code, Code::NotFound);
        assert_eq!(detail.kind(), ErrorKind::UnknownSymbol);
        assert_eq!((detail.index, detail.column), (Some(3), Some(2)));
        assert_eq!(detail.candidates, ["vfs_read"]);
    }

    #[test]
    fn ambiguous_symbol_offers_its_addresses() {
        let why = Refused::Symbol(LookupError::Ambiguous {
            name: "t_next".into(),
            at: vec![Gva(0x10), Gva(0x20)],
        });
        let (code, detail) = seen(refused(chain(&why), &why));
        assert_eq!(code, Code::InvalidArgument);
        assert_eq!(detail.candidates, ["0x10", "0x20"]);
    }

    #[test]
    fn detail_says_what_can_be_done() {
        let seen = |why: &Refused| {
            let (code, detail) = seen(refused(chain(why), why));
            (code, detail.remedy(), detail.when)
        };
        let at = Gva(0x1000);
        let (code, remedy, when) = seen(&Refused::Kprobe { at });
        assert_eq!(
            (code, remedy),
            (Code::FailedPrecondition, v1::Remedy::NotNow)
        );
        assert_eq!(when, "the guest has unregistered its own kprobe");
        let (code, remedy, when) = seen(&Refused::InitText { at });
        assert_eq!((code, remedy), (Code::InvalidArgument, v1::Remedy::Never));
        assert_eq!(when, "");
        let (_, remedy, _) = seen(&Refused::NotText { at });
        assert_eq!(remedy, v1::Remedy::WrongRequest);
    }

    #[test]
    fn clients_that_know_nothing_of_this_server_get_the_reason_and_the_field() {
        let error = ChangeError::NoSuchProbe {
            index: 2,
            id: hvprobe_spec::ProbeId(7),
        };
        let status = change_error("vm0", &error);
        let info = info(&status);
        assert_eq!(
            (info.reason.as_str(), info.domain.as_str()),
            ("NO_SUCH_PROBE", "hvprobe")
        );
        assert_eq!(info.metadata["index"], "2");
        let bad = status.get_details_bad_request().unwrap();
        let fields: Vec<_> = bad.field_violations.iter().map(|one| &one.field).collect();
        assert_eq!(fields, ["ids[2]"]);
        // If no field is to blame, none is named.
        let status = ended("vm0");
        assert_eq!(self::info(&status).reason, "MACHINE_ENDED");
        assert!(status.get_details_bad_request().is_none());
    }

    #[test]
    fn who_asks_for_too_many_probes_gets_the_limit_and_what_is_left() {
        let error = RegisterError::Unplanted {
            source: Refused::TooManyProbes { there: 2, max: 3 },
        };
        let status = register_error("vm0", &error);
        assert_eq!(status.code(), Code::ResourceExhausted);
        let info = info(&status);
        assert_eq!(info.reason, "TOO_MANY_PROBES");
        let metadata = ["limit", "most", "left"].map(|name| info.metadata[name].as_str());
        assert_eq!(metadata, ["probes_per_machine", "3", "1"]);
    }

    #[test]
    fn what_no_request_is_to_blame_for_has_a_reason_too() {
        for (status, code, reason) in [
            (booting("vm0"), Code::Unavailable, "MACHINE_BOOTING"),
            (stopping(), Code::Unavailable, "SERVER_STOPPING"),
            (over_deadline(), Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
        ] {
            assert_eq!(status.code(), code);
            assert_eq!(info(&status).reason, reason);
        }
    }

    #[test]
    fn reasons_are_of_the_form_that_is_asked_for() {
        for number in 0..128 {
            let Ok(kind) = ErrorKind::try_from(number) else {
                continue;
            };
            let reason = info(&Failure::new(Code::Internal, kind, "").into()).reason;
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
                .with(Remedy::NotNow("the guest has unregistered its own kprobe"));
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
        assert_eq!(seen(failure.offering(near.clone())).1.candidates, near);
    }

    #[test]
    fn chain_names_every_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("inner"));
        assert_eq!(chain(&error), "outer: inner");
    }
}
