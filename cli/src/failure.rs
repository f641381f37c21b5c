//! How the program ends: exit statuses, and errors as one line on standard error.

use std::fmt;
use std::process::ExitCode;

use hvprobe_proto::v1::ErrorDetail;
use hvprobe_spec::ParseError;
use prost::Message as _;

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
    fn status_without_message_still_says_something() {
        let refused = Refused::from(tonic::Status::unimplemented(""));
        let text = refused.to_string();
        assert!(text.starts_with("the server answered: "), "{text}");
    }
}
