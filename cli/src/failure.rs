//! How the program ends: exit statuses, and errors as one line on standard error.

use std::fmt;
use std::process::ExitCode;

use hvprobe_proto::v1::{ErrorDetail, ProbeSpec};
use hvprobe_spec::ParseError;
use prost::Message as _;

use crate::origins::Origins;
use crate::output::remedy::can;

/// Everything went as asked.
pub(crate) const DONE: ExitCode = ExitCode::SUCCESS;
/// Something failed.
pub(crate) const FAILED: u8 = 1;
/// The command line cannot be used; clap exits with the same.
pub(crate) const WRONG_USAGE: u8 = 2;
/// Ended by Ctrl-C or SIGTERM.
pub(crate) const INTERRUPTED: u8 = 130;

/// What the user typed cannot be used.
#[derive(Debug)]
pub(crate) struct WrongUsage(pub(crate) String);

impl fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// An error that the server answered with.
#[derive(Debug)]
pub(crate) struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl From<tonic::Status> for Refused {
    fn from(status: tonic::Status) -> Self {
        Self(match status.message() {
            "" => format!("the server answered: {}", status.code()),
            message => match detail(&status) {
                Some(detail) => format!("{message}{}", can(detail.remedy(), &detail.when)),
                None => message.to_owned(),
            },
        })
    }
}

impl Refused {
    /// Why a server does not take the probes that were `sent`, with what was typed for the one that is to blame, and a
    /// caret under what is wrong with it, if it says where.
    pub(crate) fn of_probes(status: tonic::Status, sent: &Sent) -> Self {
        let index = detail(&status).and_then(|it| it.index);
        let index = index.and_then(|index| usize::try_from(index).ok());
        let text = index.and_then(|index| sent.definitions.get(index));
        let picture = match (text, mistake(&status)) {
            (Some(text), Some(error)) => {
                let picture = sent.origins.render(text, &error);
                format!("\n  {}", picture.replace('\n', "\n  "))
            }
            _ => String::new(),
        };
        Self(format!("{}{picture}", Self::from(status)))
    }
}

/// Definitions, as they are sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) definitions: Vec<String>,
    origins: Origins,
}

/// The definitions of `probes`, as they are sent, with what was typed for them.
pub(crate) fn as_sent(probes: &[ProbeSpec], origins: &Origins) -> Sent {
    let definitions = probes.iter().map(|probe| probe.definition.clone());
    Sent {
        definitions: definitions.collect(),
        origins: origins.clone(),
    }
}

/// What an answer amounts to that says nothing but that it is done.
pub(crate) fn done<T>(
    answer: Result<tonic::Response<T>, tonic::Status>,
) -> anyhow::Result<ExitCode> {
    answer.map_err(Refused::from)?;
    Ok(DONE)
}

/// What the server says for programs.
pub(crate) fn detail(status: &tonic::Status) -> Option<ErrorDetail> {
    let packed = tonic_types::Status::decode(status.details()).ok()?;
    let detail = packed.details.first()?;
    ErrorDetail::decode(detail.value.as_slice()).ok()
}

/// What the server says is wrong with a text, if it says where.
pub(crate) fn mistake(status: &tonic::Status) -> Option<ParseError> {
    let column = usize::try_from(detail(status)?.column?).ok()?;
    let message = status.message().to_owned();
    Some(ParseError { column, message })
}

/// Prints `error` with its causes and says which exit status belongs to it.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    // A reader that has seen enough, as `head` has, is no failure.
    if closed_output(error) {
        return DONE;
    }
    crate::output::tell_failure(format_args!("{error:#}"));
    ExitCode::from(if error.is::<WrongUsage>() {
        WRONG_USAGE
    } else {
        FAILED
    })
}

/// Whether `error` says that nobody reads our output any more.
pub(crate) fn closed_output(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_probe_is_pointed_at_in_what_was_sent() {
        let detail = ErrorDetail {
            index: Some(1),
            column: Some(3),
            ..ErrorDetail::default()
        };
        let packed = tonic_types::Status {
            code: tonic::Code::NotFound.into(),
            message: String::new(),
            details: vec![prost_types::Any {
                type_url: String::new(),
                value: detail.encode_to_vec(),
            }],
        };
        let status = tonic::Status::with_details(
            tonic::Code::NotFound,
            "unknown symbol `x`",
            packed.encode_to_vec().into(),
        );
        let mut sent = Sent {
            definitions: ["p a", "p  x"].map(str::to_owned).into(),
            origins: Origins::default(),
        };
        let refused = Refused::of_probes(status.clone(), &sent);
        assert_eq!(refused.to_string(), "unknown symbol `x`\n  p  x\n     ^");
        // What was made of something else is shown as that.
        sent.origins.add("p  x".to_owned(), "ev=x:1".to_owned());
        let refused = Refused::of_probes(status.clone(), &sent);
        assert_eq!(refused.to_string(), "unknown symbol `x`\n  ev=x:1");
        // A probe that it was not asked for.
        sent.definitions.truncate(1);
        let refused = Refused::of_probes(status, &sent);
        assert_eq!(refused.to_string(), "unknown symbol `x`");
    }

    #[test]
    fn status_without_message_still_says_something() {
        let refused = Refused::from(tonic::Status::unimplemented(""));
        let text = refused.to_string();
        assert!(text.starts_with("the server answered: "), "{text}");
    }
}
