//! `hvprobe trace`: hits of a server's machine as they come.

use std::process::ExitCode;

use crate::event_args::WantedArgs;
use hvprobe_proto::v1::WaitRequest;

use crate::args::Trace;
use crate::client::{self, Client};
use crate::events_file::FileHistogram;
use crate::failure::{DONE, INTERRUPTED, Refused};
use crate::follow::{Batch, Format, Printer};
use crate::histogram::{self, Histograms};
use crate::output::{self, json, summary, table};
use crate::plant::{self, Planted};
use crate::run::next;
use crate::script::{Running, Script};
use crate::signals::Interrupt;

pub(crate) async fn trace(mut args: Trace) -> anyhow::Result<ExitCode> {
    if let Some(script) = args.script.read()? {
        return run_script(args, script).await;
    }
    args.histograms.check()?;
    if args.histograms.need_stacks() {
        args.plant.record_stacks();
    }
    if args.histograms.is_given() {
        args.plant.wait_for_room();
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
        Some(probes) => {
            let refused = |status| Refused::from(status).into();
            Some(probes.plant(&mut client, &machine, refused).await?)
        }
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

/// Carries out `script` until the machine ends, or the script does.
async fn run_script(args: Trace, script: Script) -> anyhow::Result<ExitCode> {
    let to_plant = args.plant.read_script(&script)?;
    let mut interrupt = Interrupt::install()?;
    let (mut client, machine) = Client::on_machine(&args.on).await?;
    // A script may do without any.
    let mut planted: Option<Planted> = match script.program.probes.is_empty() {
        true => None,
        false => {
            let refused = |status| script.refused(status);
            Some(to_plant.plant(&mut client, &machine, refused).await?)
        }
    };
    let ids = planted.as_ref().map_or_else(Vec::new, |it| it.ids.clone());
    let outcome = tokio::select! {
        outcome = follow_script(client, &machine, ids, script, &mut interrupt) => outcome,
        why = plant::lost(&mut planted) => Err(why),
    };
    if let Some(planted) = planted {
        let closed = planted.session.close().await;
        // What went wrong first says more.
        return outcome.and_then(|status| closed.map(|()| status));
    }
    outcome
}

/// Carries out `script`, whose probes are `ids`.
async fn follow_script(
    mut client: Client,
    machine: &str,
    ids: Vec<u32>,
    script: Script,
    interrupt: &mut Interrupt,
) -> anyhow::Result<ExitCode> {
    let mut probes = client.list_probes(machine).await?;
    probes.retain(|probe| ids.contains(&probe.id));
    let mut running = Running::begin(&mut client, machine, &probes, script).await?;
    let wanted = running.wanted();
    let mut stream = match wanted.is_empty() {
        true => None,
        false => {
            let request = WantedArgs::default().request(machine, wanted);
            let subscribed = client.events.subscribe(request).await;
            Some(subscribed.map_err(Refused::from)?.into_inner())
        }
    };
    let mut waiting = client.machines.clone();
    let ended = waiting.wait(WaitRequest {
        machine: machine.to_owned(),
    });
    tokio::pin!(ended);
    let status = loop {
        if running.is_over() {
            break DONE;
        }
        tokio::select! {
            () = interrupt.asked() => break ExitCode::from(INTERRUPTED),
            index = running.tick() => running.ticked(&mut client, index).await?,
            batch = next(&mut stream) => match batch.map_err(Refused::from)? {
                Some(batch) => {
                    if let Batch::Ended(ending) = running.show(&mut client, batch).await? {
                        let how = table::ending_text(&ending);
                        output::tell(format_args!("{machine} ended: {how}"));
                        break DONE;
                    }
                }
                None => break DONE,
            },
            // With events, they say how.
            ended = &mut ended, if stream.is_none() => {
                let ending = ended.map_err(Refused::from)?.into_inner().ending;
                let how = table::ending_text(&ending.unwrap_or_default());
                output::tell(format_args!("{machine} ended: {how}"));
                break DONE;
            }
        }
    };
    plant::turn_off(&mut client, machine, ids).await;
    running.end(&mut client).await?;
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
