//! `hvprobe explain`: shows how definitions resolve in a kernel, without running it.

use std::process::ExitCode;

use hvprobe_proto::detail;
use hvprobe_proto::v1::ErrorKind;
use hvprobe_sources::{ExplainError, explain};
use hvprobe_spec::definition::parse;

use crate::definitions::debug_info::open_kernel;
use crate::definitions::{cache, events_file, perf_probe, probes};
use crate::failure::{DONE, FAILED, Refused, Sent, as_sent};
use crate::options::explain::Explain;
use crate::output::{self, explained, json};

pub(crate) fn run(args: Explain) -> anyhow::Result<ExitCode> {
    let path = cache::kernel(args.kernel.as_deref())?;
    let (definitions, _) =
        perf_probe::of_kernel(&args.debug, args.definitions, || Ok(path.clone()))?;
    let (probes, histograms) =
        probes::specs(&definitions, &args.events, false, &args.hit, &args.hold)?;
    events_file::refuse(&histograms, "`hvprobe explain`")?;
    let kernel = open_kernel(&path)?;
    let sent = as_sent(&probes, &definitions.origins);
    let all = match explain(&kernel, probes) {
        Ok(all) => all,
        Err(ExplainError::Request(status)) => return Err(Refused::from(status).into()),
        Err(error) => return Err(error.into()),
    };
    let mut status = DONE;
    for (number, explanation) in all.iter().enumerate() {
        match &explanation.outcome {
            Ok(explained) if args.json => json::print(&json::Shown(explained))?,
            Ok(explained) => {
                let gap = if number > 0 { "\n" } else { "" };
                output::print(&format!("{gap}{}", explained::text(explained)))?;
            }
            Err(refused) => {
                status = ExitCode::from(FAILED);
                let message = why_refused(&explanation.definition, refused, &sent);
                output::error(format_args!("{message}"));
            }
        }
    }
    Ok(status)
}

/// Returns the reason for the refusal of `definition`, with the position of the mistake if it is known.
/// `definition` is one of the definitions in `sent`, or was generated from a pattern among them.
fn why_refused(definition: &str, refused: &tonic::Status, sent: &Sent) -> String {
    let is_read = detail(refused).is_some_and(|it| it.kind() != ErrorKind::Definition);
    let refused = Refused::of_probes(refused.clone(), sent);
    // The user did not type a definition that was generated from a pattern, so the message has to show it.
    let mut typed = sent.definitions.iter().filter_map(|text| parse(text).ok());
    let is_typed = typed.any(|it| it.to_string() == definition);
    match (is_read, is_typed) {
        (true, _) => format!("{definition}: {refused}"),
        (false, true) => format!("bad definition: {refused}"),
        (false, false) => format!("{definition}: bad definition: {refused}"),
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::v1::ProbeSpec;

    use super::*;
    use crate::failure::Origins;

    #[test]
    fn a_function_of_a_pattern_is_named_where_its_arguments_are_refused() {
        let refused = tonic::Status::invalid_argument("no such variable");
        let specs = ["p  vfs_read x", "p vfs_* x"].map(|definition| ProbeSpec {
            definition: definition.to_owned(),
            ..Default::default()
        });
        let sent = as_sent(&specs, &Origins::default());
        let why = |definition: &str| why_refused(definition, &refused, &sent);
        assert_eq!(why("p vfs_read x"), "bad definition: no such variable");
        assert_eq!(
            why("p vfs_write x"),
            "p vfs_write x: bad definition: no such variable"
        );
    }
}
