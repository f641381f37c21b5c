//! `hvprobe trace`: hits of a server's machine as they come.

use std::process::ExitCode;

use hvprobe_proto::v1::WaitRequest;

use crate::args::Trace;
use crate::client::{self, Client};
use crate::events_file::FileHistogram;
use crate::failure::{DONE, INTERRUPTED, Refused};
use crate::follow::{Batch, Format, Printer};
use crate::histogram::{self, Histograms};
use crate::output::{self, json, summary, table};
use crate::plant;
use crate::signals::Interrupt;

pub(crate) async fn trace(mut args: Trace) -> anyhow::Result<ExitCode> {
    args.histograms.check()?;
    if args.histograms.need_stacks() {
        args.plant.record_stacks();
    }
    let to_plant = args.plant.clone().read()?;
    let in_files = to_plant
        .as_ref()
        .map_or_else(Vec::new, |it| it.histograms.clone());
    args.histograms.check_shown(&in_files)?;
    args.wanted.check()?;
    let format = if args.json {
        Format::Json
    } else {
        Format::Text
    };
    // Opening a pipe waits for its reader, which Ctrl-C still ends.
    let printer = Printer::new(format, args.hits, &args.output)?;
    let mut interrupt = Interrupt::install()?;
    let (mut client, machine) = Client::on_machine(&args.on).await?;
    let mut planted = match to_plant {
        Some(probes) => Some(probes.plant(&mut client, &machine).await?),
        None => None,
    };
    let own = Own {
        ids: planted.as_ref().map_or_else(Vec::new, |it| it.ids.clone()),
        in_files,
    };
    let outcome = tokio::select! {
        outcome = trace_probes(args, client, &machine, own, printer, &mut interrupt) => outcome,
        why = plant::lost(&mut planted) => Err(why),
    };
    if let Some(planted) = planted {
        let closed = planted.session.close().await;
        // What went wrong first says more.
        return outcome.and_then(|status| closed.map(|()| status));
    }
    outcome
}

/// What the command has planted.
#[derive(Debug)]
struct Own {
    ids: Vec<u32>,
    /// What is counted of them.
    in_files: Vec<FileHistogram>,
}

/// Traces the probes that `args` names, and `own`, which it planted.
async fn trace_probes(
    args: Trace,
    mut client: Client,
    machine: &str,
    own: Own,
    mut printer: Printer,
    interrupt: &mut Interrupt,
) -> anyhow::Result<ExitCode> {
    let mut chosen = if args.probes.is_empty() {
        Vec::new()
    } else {
        client::choose(&client.list_probes(machine).await?, &args.probes)?
    };
    chosen.extend(&own.ids);
    let format = match args.json {
        true => Format::Json,
        false => Format::Text,
    };
    let (counted, in_files) = (&args.histograms, &own.in_files);
    let mut probes = match counted.is_given() || !in_files.is_empty() {
        true => client.list_probes(machine).await?,
        false => Vec::new(),
    };
    probes.retain(|probe| chosen.is_empty() || chosen.contains(&probe.id));
    let printed = histogram::printed(&probes, counted, in_files);
    let mut histograms =
        Histograms::begin(&mut client, machine, &probes, counted, in_files, format).await?;
    let Some(printed) = printed else {
        return match histograms {
            Some(histograms) => count(client, machine, histograms, interrupt).await,
            None => Ok(DONE),
        };
    };
    let printed = match printed.is_empty() {
        true => chosen.clone(),
        false => printed,
    };
    let request = args.wanted.request(machine, printed);
    let subscribed = client.events.subscribe(request).await;
    let mut stream = subscribed
        .map_err(|status| args.wanted.refused(status))?
        .into_inner();

    let mut probes = client.list_probes(machine).await.unwrap_or_default();
    probes.retain(|probe| chosen.is_empty() || chosen.contains(&probe.id));
    printer.prepare(&mut client, machine, &probes).await;

    let status = loop {
        let batch = tokio::select! {
            batch = stream.message() => batch.map_err(Refused::from)?,
            () = interrupt.asked() => break ExitCode::from(INTERRUPTED),
            () = histogram::tick(&mut histograms) => {
                histogram::print(&mut histograms, &mut client).await?;
                continue;
            }
        };
        let Some(batch) = batch else {
            break DONE;
        };
        match printer.show(&mut client, batch).await? {
            Batch::More => {}
            Batch::Ended(ending) => {
                let how = table::ending_text(&ending);
                output::tell(format_args!("{machine} ended: {how}"));
                break DONE;
            }
            Batch::Enough => break DONE,
        }
    };

    // What is left of the machine, if the server is still there.
    plant::turn_off(&mut client, machine, own.ids).await;
    histogram::print(&mut histograms, &mut client).await?;
    let mut probes = client.list_probes(machine).await.unwrap_or_default();
    probes.retain(|probe| chosen.is_empty() || chosen.contains(&probe.id));
    close(&mut printer, &probes, format)?;
    Ok(status)
}

/// Counts hits instead of printing them.
async fn count(
    mut client: Client,
    machine: &str,
    mut histograms: Histograms,
    interrupt: &mut Interrupt,
) -> anyhow::Result<ExitCode> {
    let request = WaitRequest {
        machine: machine.to_owned(),
    };
    let mut waiting = client.machines.clone();
    let ended = waiting.wait(request);
    tokio::pin!(ended);
    let status = loop {
        tokio::select! {
            ended = &mut ended => {
                let ending = ended.map_err(Refused::from)?.into_inner().ending;
                let how = table::ending_text(&ending.unwrap_or_default());
                output::tell(format_args!("{machine} ended: {how}"));
                break DONE;
            }
            () = interrupt.asked() => break ExitCode::from(INTERRUPTED),
            () = histograms.tick() => histograms.print(&mut client).await?,
        }
    };
    histograms.print(&mut client).await?;
    Ok(status)
}

/// Prints what a trace amounted to.
pub(crate) fn close(
    printer: &mut Printer,
    probes: &[hvprobe_proto::v1::Probe],
    format: Format,
) -> anyhow::Result<()> {
    let rows = printer.tally.rows(probes);
    if format == Format::Json {
        for row in &rows {
            let line = serde_json::to_string(&json::Line::Summary(row.into()))?;
            printer.write(&format!("{line}\n"))?;
        }
    } else if !rows.is_empty() {
        output::note(format_args!(
            "\n{}",
            summary::text(&rows, printer.tally.dropped)
        ));
    }
    Ok(())
}
