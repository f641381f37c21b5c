//! Errors that the server answers with. Errors about a probe show what the user typed for it.

use std::fmt;
use std::process::ExitCode;

use hvprobe_proto::detail;
use hvprobe_proto::v1::ProbeSpec;
use hvprobe_spec::ParseError;

use super::origins::Origins;
use super::status::DONE;
use crate::output::remedy::can;

/// Error that the server answered with.
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
    /// Returns the error for refused probes. If the server reports which probe is at fault, and where the mistake
    /// is, the error shows what the user typed for that probe, with a caret under the mistake.
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

/// Definitions in the form that is sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) definitions: Vec<String>,
    origins: Origins,
}

/// Returns the definitions of `probes` as they are sent, with what the user typed for them.
pub(crate) fn as_sent(probes: &[ProbeSpec], origins: &Origins) -> Sent {
    let definitions = probes.iter().map(|probe| probe.definition.clone());
    Sent {
        definitions: definitions.collect(),
        origins: origins.clone(),
    }
}

/// Returns the contents of an answer, or the server's error.
pub(crate) fn answered<T>(answer: Result<tonic::Response<T>, tonic::Status>) -> Result<T, Refused> {
    Ok(answer?.into_inner())
}

/// Returns the exit status for an answer without contents.
pub(crate) fn done<T>(
    answer: Result<tonic::Response<T>, tonic::Status>,
) -> anyhow::Result<ExitCode> {
    answered(answer)?;
    Ok(DONE)
}

/// Returns the mistake in a text, if the server reports its column.
pub(crate) fn mistake(status: &tonic::Status) -> Option<ParseError> {
    let column = usize::try_from(detail(status)?.column?).ok()?;
    let message = status.message().to_owned();
    Some(ParseError { column, message })
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::Failure;
    use hvprobe_proto::v1::ErrorKind;

    use super::*;

    #[test]
    fn what_is_wrong_with_a_probe_is_pointed_at_in_what_was_sent() {
        let failure = Failure::invalid(ErrorKind::UnknownSymbol, "unknown symbol `x`");
        let status = tonic::Status::from(failure.at_index(1).at_column(3));
        let mut sent = Sent {
            definitions: ["p a", "p  x"].map(str::to_owned).into(),
            origins: Origins::default(),
        };
        let refused = Refused::of_probes(status.clone(), &sent);
        assert_eq!(refused.to_string(), "unknown symbol `x`\n  p  x\n     ^");
        // A generated definition is shown as the user typed it.
        sent.origins.add("p  x".to_owned(), "ev=x:1".to_owned());
        let refused = Refused::of_probes(status.clone(), &sent);
        assert_eq!(refused.to_string(), "unknown symbol `x`\n  ev=x:1");
        // An index beyond the request is ignored.
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
