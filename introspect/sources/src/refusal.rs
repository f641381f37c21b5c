//! Converts the reason why a probe is refused into the error that a client gets. Used when probes are registered,
//! and for answers without a machine.

use hvprobe_engine::{Refused, Remedy};
use hvprobe_linux::symbols::LookupError;
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{self, ErrorKind};
use tonic::Code;

/// Returns the error for a place that cannot be probed. `message` names the probe and the reason.
#[must_use]
pub fn refused(message: String, why: &Refused) -> Failure {
    let (remedy, when) = remedy(why.remedy());
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
    .with(remedy, when)
}

/// Converts `remedy` to the protocol's form: what can be done about a refusal, and the condition to wait for. The
/// condition is empty if waiting does not help.
#[must_use]
pub fn remedy(remedy: Remedy) -> (v1::Remedy, &'static str) {
    match remedy {
        Remedy::Never => (v1::Remedy::Never, ""),
        Remedy::NotNow(when) => (v1::Remedy::NotNow, when),
        Remedy::WrongRequest => (v1::Remedy::WrongRequest, ""),
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Gva;
    use hvprobe_proto::detail;
    use hvprobe_proto::v1::ErrorDetail;
    use hvprobe_spec::chain;
    use tonic::Status;

    use super::*;

    /// Returns the code and the detail of `failure` that a client sees.
    fn seen(failure: Failure) -> (Code, ErrorDetail) {
        let status = Status::from(failure);
        (status.code(), detail(&status).unwrap())
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
}
