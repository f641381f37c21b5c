//! `hvprobe explain`: what definitions come to in a kernel, without running it.

use std::process::ExitCode;

use anyhow::Context as _;
use hvprobe_server::{ExplainError, Explanation, Kernel, explain};
use hvprobe_spec::ParseError;

use crate::definition;
use crate::explain_args::Explain;
use crate::failure::{DONE, FAILED, Refused, detail};
use crate::output::{self, explained, json};
use crate::typed::bad;
use crate::{events_file, guest};

pub(crate) fn run(args: Explain) -> anyhow::Result<ExitCode> {
    let path = guest::kernel(args.kernel)?;
    let definitions = args
        .debug
        .of_kernel(args.definitions, || Ok(path.clone()))?;
    let (probes, histograms) =
        definition::specs(&definitions, &args.events, false, &args.hit, &args.hold)?;
    events_file::refuse(&histograms, "`hvprobe explain`")?;
    let kernel = Kernel::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let all = match explain(&kernel, probes) {
        Ok(all) => all,
        Err(ExplainError::Request(status)) => return Err(Refused::from(status).into()),
        Err(error) => return Err(error.into()),
    };
    let mut status = DONE;
    for (
        number,
        Explanation {
            definition,
            outcome,
        },
    ) in all.iter().enumerate()
    {
        match outcome {
            Ok(explained) if args.json => json::print(&explained::json(explained))?,
            Ok(explained) => {
                let gap = if number > 0 { "\n" } else { "" };
                output::print(&format!("{gap}{}", explained::text(explained)))?;
            }
            Err(refused) => {
                status = ExitCode::from(FAILED);
                output::tell_failure(format_args!("{}", told(definition, refused)));
            }
        }
    }
    Ok(status)
}

/// Why `definition` is refused, and where it is wrong if that is known.
fn told(definition: &str, refused: &tonic::Status) -> String {
    let column = detail(refused).and_then(|detail| detail.column);
    match column.and_then(|column| usize::try_from(column).ok()) {
        Some(column) => {
            let message = refused.message().to_owned();
            bad("definition", definition, &ParseError { column, message }).0
        }
        None => format!("{definition}: {}", Refused::from(refused.clone())),
    }
}
