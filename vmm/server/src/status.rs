//! Errors on the wire: a gRPC status for people, with an [`ErrorDetail`] for programs.

use std::error::Error;
use std::fmt;

use hvprobe_engine::{ChangeError, Refused, RegisterError, Remedy, StopError};
use hvprobe_linux::symbols::LookupError;
use hvprobe_proto::v1::{self, ErrorDetail, ErrorKind};
use prost::Message as _;
use tonic::{Code, Status};

/// The name under which a detail is packed (`google.protobuf.Any.type_url`).
const DETAIL: &str = "type.googleapis.com/hvprobe.v1.ErrorDetail";

/// An error on its way out.
#[derive(Debug)]
pub(crate) struct Failure {
    code: Code,
    message: String,
    detail: ErrorDetail,
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
        }
    }

    /// Tells which entry of the batch is to blame.
    pub(crate) fn at_index(mut self, index: usize) -> Self {
        self.detail.index = u32::try_from(index).ok();
        self
    }

    /// Tells which character of the definition is to blame.
    pub(crate) fn at_column(mut self, column: usize) -> Self {
        self.detail.column = u32::try_from(column).ok();
        self
    }

    /// Tells what can be done about it.
    fn with(mut self, can: Remedy) -> Self {
        let (remedy, when) = remedy(can);
        self.detail.remedy = remedy.into();
        when.clone_into(&mut self.detail.when);
        self
    }

    /// Offers what could have been meant.
    pub(crate) fn offering(mut self, candidates: impl IntoIterator<Item = String>) -> Self {
        self.detail.candidates = candidates.into_iter().collect();
        self
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let Failure {
            code,
            message,
            detail,
        } = failure;
        let packed = tonic_types::Status {
            code: code.into(),
            message: message.clone(),
            details: vec![prost_types::Any {
                type_url: DETAIL.into(),
                value: detail.encode_to_vec(),
            }],
        };
        Self::with_details(code, message, packed.encode_to_vec().into())
    }
}

/// `error` and what caused it, in one line.
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

/// The status for a place that cannot be probed; `message` says of which probe and why.
pub(crate) fn refused(message: String, why: &Refused) -> Failure {
    match why {
        Refused::Symbol(LookupError::Unknown { near, .. }) | Refused::NoMatch { near, .. } => {
            Failure::new(Code::NotFound, ErrorKind::UnknownSymbol, message)
                .offering(near.iter().cloned())
        }
        Refused::Symbol(LookupError::Ambiguous { at, .. }) => {
            Failure::new(Code::InvalidArgument, ErrorKind::AmbiguousSymbol, message)
                .offering(at.iter().map(ToString::to_string))
        }
        Refused::Argument(error) => {
            Failure::new(Code::InvalidArgument, ErrorKind::Definition, message)
                .at_column(error.column)
        }
        Refused::TooManyProbes { .. } => {
            Failure::new(Code::ResourceExhausted, ErrorKind::TooManyProbes, message)
        }
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

/// What can be done about a refusal, and what to wait for, on the wire.
pub(crate) fn remedy(remedy: Remedy) -> (v1::Remedy, &'static str) {
    match remedy {
        Remedy::Never => (v1::Remedy::Never, ""),
        Remedy::NotNow(when) => (v1::Remedy::NotNow, when),
        Remedy::WrongRequest => (v1::Remedy::WrongRequest, ""),
    }
}

/// Why a batch was not registered, for clients.
pub(crate) fn register_error(machine: &str, error: &RegisterError) -> Status {
    match error {
        RegisterError::Refused { index, source, .. } => {
            refused(chain(error), source).at_index(*index).into()
        }
        RegisterError::SomeRefused { index, first, .. } => {
            let why = &first.why;
            refused(chain(error), why).at_index(*index).into()
        }
        RegisterError::Unplanted { source } => refused(chain(error), source).into(),
        RegisterError::Spec { index, .. } => {
            Failure::new(Code::InvalidArgument, ErrorKind::BadActions, chain(error))
                .at_index(*index)
                .into()
        }
        RegisterError::Stop(stop) => stop_error(machine, stop),
    }
}

/// Why probes were not changed, for clients.
pub(crate) fn change_error(machine: &str, error: &ChangeError) -> Status {
    match error {
        ChangeError::NoSuchProbe { index, .. } => {
            Failure::new(Code::NotFound, ErrorKind::NoSuchProbe, chain(error))
                .at_index(*index)
                .into()
        }
        ChangeError::Refused { source, .. } => refused(chain(error), source).into(),
        ChangeError::Stop(stop) => stop_error(machine, stop),
    }
}

/// Why the virtual CPUs of a machine could not be stopped, for clients.
pub(crate) fn stop_error(machine: &str, error: &StopError) -> Status {
    match error {
        StopError::Ended => ended(machine),
        StopError::Unresponsive { .. } => {
            Failure::new(Code::Internal, ErrorKind::Host, chain(error)).into()
        }
    }
}

/// The machine `name` is not there yet.
pub(crate) fn booting(name: &str) -> Status {
    Failure::new(
        Code::Unavailable,
        ErrorKind::MachineBooting,
        format!("machine `{name}` is being booted: try again when it is"),
    )
    .into()
}

/// The machine `name` has ended.
pub(crate) fn ended(name: &str) -> Status {
    Failure::new(
        Code::FailedPrecondition,
        ErrorKind::MachineEnded,
        format!("machine `{name}` has ended"),
    )
    .into()
}

/// A part of the server has panicked; the panic has been printed.
pub(crate) fn broken(part: impl fmt::Display) -> Status {
    Status::internal(format!("hvprobe is broken: {part} panicked"))
}

#[cfg(test)]
pub(crate) mod tests {
    use hvprobe_arch::Gva;

    use super::*;

    /// The detail of an error.
    pub(crate) fn detail(status: &Status) -> ErrorDetail {
        let packed = tonic_types::Status::decode(status.details()).unwrap();
        assert_eq!(packed.message, status.message());
        assert_eq!(packed.code, i32::from(status.code()));
        ErrorDetail::decode(packed.details[0].value.as_slice()).unwrap()
    }

    /// What a client sees of `failure`.
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
    fn chain_names_every_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("inner"));
        assert_eq!(chain(&error), "outer: inner");
    }
}
