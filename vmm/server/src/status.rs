//! Errors of the engine and the machine on the wire.

use std::error::Error as _;
use std::fmt;

use hvprobe_engine::{ChangeError, RegisterError, StopError};
use hvprobe_machine::{
    AGGREGATION_BYTES, AGGREGATIONS_MAX, AggregateError, NmiError, PauseError, ReadError,
};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use hvprobe_sources::refused;
use hvprobe_spec::chain;
use tonic::{Code, Status};

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
        ChangeError::Refused { source, .. } | ChangeError::Site { source, .. } => {
            refused(chain(error), source).into()
        }
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

/// Converts the error of a pause or a resume for clients.
pub(crate) fn pause_error(machine: &str, error: &PauseError) -> Status {
    match error.source().and_then(|source| source.downcast_ref()) {
        Some(stop) => stop_error(machine, stop),
        None => Failure::new(Code::Internal, ErrorKind::Host, chain(error)).into(),
    }
}

/// Converts the error of an NMI for clients.
pub(crate) fn nmi_error(machine: &str, error: &NmiError) -> Status {
    match error {
        NmiError::NoSuchVcpu { .. } => Failure::invalid(ErrorKind::NoSuchCpu, chain(error)).into(),
        NmiError::Stop(stop) => stop_error(machine, stop),
    }
}

/// Converts the error of reading memory for clients.
pub(crate) fn read_error(error: &ReadError) -> Status {
    let code = match error {
        ReadError::Booting => Code::FailedPrecondition,
        ReadError::Walk(_) => Code::InvalidArgument,
    };
    Failure::new(code, ErrorKind::Unreadable, chain(error)).into()
}

/// Converts the error of a histogram for clients.
pub(crate) fn aggregate_error(error: &AggregateError) -> Status {
    let message = chain(error);
    match error {
        AggregateError::TooMany => Failure::new(
            Code::ResourceExhausted,
            ErrorKind::TooManyHistograms,
            message,
        )
        .bound("histograms_per_machine", AGGREGATIONS_MAX, 0)
        .into(),
        AggregateError::NoRoom { index, left } => Failure::new(
            Code::ResourceExhausted,
            ErrorKind::TooManyHistograms,
            message,
        )
        .bound("histogram_bytes_per_machine", AGGREGATION_BYTES, left)
        .at_index(*index)
        .into(),
        AggregateError::NoSuchProbe { index, .. } => {
            Failure::new(Code::NotFound, ErrorKind::NoSuchProbe, message)
                .at_index(*index)
                .into()
        }
        AggregateError::Field { index, source, .. } => {
            Failure::invalid(ErrorKind::Definition, message)
                .at_index(*index)
                .at_column(source.column)
                .into()
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
    use hvprobe_proto::v1::ErrorDetail;
    use prost::Message as _;
    use tonic_types::StatusExt as _;

    use super::*;

    /// Returns the detail of an error.
    pub(crate) fn detail(status: &Status) -> ErrorDetail {
        let packed = tonic_types::Status::decode(status.details()).unwrap();
        assert_eq!(packed.message, status.message());
        assert_eq!(packed.code, i32::from(status.code()));
        hvprobe_proto::detail(status).unwrap()
    }

    /// Returns the standard details of an error, which every client knows.
    pub(crate) fn info(status: &Status) -> tonic_types::ErrorInfo {
        status.get_details_error_info().unwrap()
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
            source: hvprobe_engine::Refused::TooManyProbes { there: 2, max: 3 },
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
}
