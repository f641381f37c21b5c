//! `hvprobe explain`: what definitions come to in a kernel, without running it.

use std::process::ExitCode;

use hvprobe_server::{ExplainError, explain};

use crate::definition;
use crate::explain_args::Explain;
use crate::failure::{DONE, FAILED, Refused, mistake};
use crate::output::{self, explained, json};
use crate::perf_probe::open_kernel;
use crate::typed::bad;
use crate::{events_file, guest};

pub(crate) fn run(args: Explain) -> anyhow::Result<ExitCode> {
    let path = guest::kernel(args.kernel)?;
    let (definitions, _) = args
        .debug
        .of_kernel(args.definitions, || Ok(path.clone()))?;
    let (probes, histograms) =
        definition::specs(&definitions, &args.events, false, &args.hit, &args.hold)?;
    events_file::refuse(&histograms, "`hvprobe explain`")?;
    let kernel = open_kernel(&path)?;
    let all = match explain(&kernel, probes) {
        Ok(all) => all,
        Err(ExplainError::Request(status)) => return Err(Refused::from(status).into()),
        Err(error) => return Err(error.into()),
    };
    let mut status = DONE;
    for (number, explanation) in all.iter().enumerate() {
        match &explanation.outcome {
            Ok(explained) if args.json => json::print(&explained::json(explained))?,
            Ok(explained) => {
                let gap = if number > 0 { "\n" } else { "" };
                output::print(&format!("{gap}{}", explained::text(explained)))?;
            }
            Err(refused) => {
                status = ExitCode::from(FAILED);
                output::tell_failure(format_args!("{}", told(&explanation.definition, refused)));
            }
        }
    }
    Ok(status)
}

/// Why `definition` is refused, and where it is wrong if that is known.
fn told(definition: &str, refused: &tonic::Status) -> String {
    match mistake(refused) {
        Some(error) => bad("definition", definition, &error).0,
        None => format!("{definition}: {}", Refused::from(refused.clone())),
    }
}
