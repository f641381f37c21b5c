//! `hvprobe trace`: prints hits on a server's machine as they happen.

mod plant;

use std::collections::HashMap;
use std::process::ExitCode;

use hvprobe_proto::v1::{Ending, Probe, WaitRequest};
use tonic::Streaming;

use crate::client::{self, Client};
use crate::definitions::events_file::FileHistogram;
use crate::failure::{DONE, INTERRUPTED, Refused, Sent, answered};
use crate::follow::histograms::{self, Histograms};
use crate::follow::optional_future::or_never;
use crate::follow::printer::{Batch, Format, Printer};
use crate::options::command_line::Trace;
use crate::options::events::WantedArgs;
use crate::output::{self, json, summary, table, waiting};
use crate::script::{Running, Script};
use crate::terminal::signals::Interrupt;
use plant::{Planted, ToPlant};

pub(crate) async fn trace(mut args: Trace) -> anyhow::Result<ExitCode> {
    if let Some(script) = Script::read(&args.script)? {
        return run_script(args, script).await;
    }
    args.histograms.check()?;
    args.plant.count(&args.histograms);
    let (to_plant, theirs) = ToPlant::read(args.plant.clone())?;
    let in_files = to_plant
        .as_ref()
        .map_or_else(Vec::new, |it| it.histograms.clone());
    args.histograms.check_shown(!in_files.is_empty())?;
    args.wanted.check()?;
    let format = if args.json {
        Format::Json
    } else {
        Format::Text
    };
    // Opening a named pipe waits for its reader; Ctrl-C still has its default effect here and ends that wait.
    let printer = Printer::new(format, args.hits, &args.output)?;
    let mut interrupt = Interrupt::install()?;
    let (mut client, machine) = Client::on_machine(&args.on).await?;
    client.use_debug_info(theirs, &machine).await?;
    let planted = match to_plant {
        Some(probes) => {
            let refused = |status, sent: &Sent| Refused::of_probes(status, sent).into();
            Some(probes.plant(&mut client, &machine, refused).await?)
        }
        None => None,
    };
    let own = Own {
        ids: planted.as_ref().map_or_else(Vec::new, |it| it.ids.clone()),
        in_files,
    };
    let traced = trace_probes(args, client, &machine, own, printer, &mut interrupt);
    Planted::during(planted, traced).await
}

/// Probes that the command has planted.
#[derive(Debug)]
struct Own {
    ids: Vec<u32>,
    /// Histograms from files of definitions.
    in_files: Vec<FileHistogram>,
}

/// Traces the probes that `args` names, and the planted probes `own`.
async fn trace_probes(
    args: Trace,
    mut client: Client,
    machine: &str,
    own: Own,
    mut printer: Printer,
    interrupt: &mut Interrupt,
) -> anyhow::Result<ExitCode> {
    let format = printer.format;
    let (counted, in_files) = (&args.histograms, &own.in_files);
    let is_counted = counted.is_given() || !in_files.is_empty();
    let mut probes = match is_counted || !args.probes.is_empty() {
        true => client.list_probes(machine).await?,
        false => Vec::new(),
    };
    let mut chosen = client::choose(&probes, &args.probes)?;
    chosen.extend(&own.ids);
    let is_chosen = |probe: &Probe| chosen.is_empty() || chosen.contains(&probe.id);
    let is_up = waiting::is_up(&probes);
    probes.retain(is_chosen);
    let printed = histograms::printed(&probes, counted, in_files);
    if printed.is_none() {
        print_awaited(&probes, is_up);
    }
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
    let is_up = waiting::is_up(&probes);
    probes.retain(is_chosen);
    print_awaited(&probes, is_up);
    tokio::select! {
        () = printer.prepare(&mut client, machine, &probes) => {}
        // Checked again in the loop below.
        () = interrupt.asked() => {}
    }

    let status = loop {
        let batch = tokio::select! {
            batch = stream.message() => batch.map_err(Refused::from)?,
            () = interrupt.asked() => break ExitCode::from(INTERRUPTED),
            () = or_never(histograms.as_mut().map(Histograms::tick)) => {
                histograms::print(&mut histograms, &mut client).await?;
                continue;
            }
        };
        let Some(batch) = batch else {
            break DONE;
        };
        match printer.show(&mut client, batch).await? {
            Batch::More => {}
            Batch::Ended(ending) => break ended(machine, Some(ending)),
            Batch::Enough => break DONE,
        }
    };

    // If the machine or the server is gone, the probes cannot be disabled or listed. These errors are ignored.
    plant::turn_off(&mut client, machine, own.ids).await;
    histograms::print(&mut histograms, &mut client).await?;
    let mut probes = client.list_probes(machine).await.unwrap_or_default();
    probes.retain(is_chosen);
    close(&mut printer, &probes)?;
    Ok(status)
}

/// Runs `script` until the machine or the script ends.
async fn run_script(args: Trace, script: Script) -> anyhow::Result<ExitCode> {
    let (to_plant, theirs) = ToPlant::of_script(args.plant, &script)?;
    let mut interrupt = Interrupt::install()?;
    let (mut client, machine) = Client::on_machine(&args.on).await?;
    client.use_debug_info(theirs, &machine).await?;
    // A script may have no probes.
    let planted = match script.program.probes.is_empty() {
        true => None,
        false => {
            let refused = |status, _: &Sent| script.refused(status);
            Some(to_plant.plant(&mut client, &machine, refused).await?)
        }
    };
    let positions = planted
        .as_ref()
        .map(|it| script.positions(&it.ids, &it.entries));
    let followed = async {
        let positions = positions.transpose()?.unwrap_or_default();
        follow_script(client, &machine, positions, script, &mut interrupt).await
    };
    Planted::during(planted, followed).await
}

/// Runs `script`. `positions` has, by id, the position of each probe in the script.
async fn follow_script(
    mut client: Client,
    machine: &str,
    positions: HashMap<u32, usize>,
    script: Script,
    interrupt: &mut Interrupt,
) -> anyhow::Result<ExitCode> {
    let mut probes = client.list_probes(machine).await?;
    let is_up = waiting::is_up(&probes);
    probes.retain(|probe| positions.contains_key(&probe.id));
    print_awaited(&probes, is_up);
    let ids = positions.keys().copied().collect();
    let mut running = Running::begin(&mut client, machine, &probes, script, positions).await?;
    let wanted = running.wanted();
    let mut stream = match wanted.is_empty() {
        true => None,
        false => {
            let request = WantedArgs::default().request(machine, wanted);
            Some(answered(client.events.subscribe(request).await)?)
        }
    };
    let mut waiting = client.machines.clone();
    let end = waiting.wait(WaitRequest {
        machine: machine.to_owned(),
    });
    tokio::pin!(end);
    let status = loop {
        if running.is_over() {
            break DONE;
        }
        tokio::select! {
            () = interrupt.asked() => break ExitCode::from(INTERRUPTED),
            index = running.tick() => running.ticked(&mut client, index).await?,
            batch = or_never(stream.as_mut().map(Streaming::message)) => {
                let Some(batch) = batch.map_err(Refused::from)? else {
                    break DONE;
                };
                if let Batch::Ended(ending) = running.show(&mut client, batch).await? {
                    break ended(machine, Some(ending));
                }
            }
            // With events, the stream of events reports the ending.
            answer = &mut end, if stream.is_none() => {
                break ended(machine, answered(answer)?.ending);
            }
        }
    };
    plant::turn_off(&mut client, machine, ids).await;
    running.end(&mut client).await?;
    Ok(status)
}

/// Reports the conditions that some of `probes` wait for.
fn print_awaited(probes: &[Probe], is_up: bool) {
    for line in waiting::lines(probes, is_up) {
        output::notice(format_args!("{line}"));
    }
}

/// Counts hits instead of printing them.
async fn count(
    mut client: Client,
    machine: &str,
    mut histograms: Histograms,
    interrupt: &mut Interrupt,
) -> anyhow::Result<ExitCode> {
    let mut waiting = client.machines.clone();
    let end = waiting.wait(WaitRequest {
        machine: machine.to_owned(),
    });
    tokio::pin!(end);
    let status = loop {
        tokio::select! {
            answer = &mut end => {
                break ended(machine, answered(answer)?.ending);
            }
            () = interrupt.asked() => break ExitCode::from(INTERRUPTED),
            () = histograms.tick() => histograms.print(&mut client).await?,
        }
    };
    histograms.print(&mut client).await?;
    Ok(status)
}

/// Reports how `machine` ended; returns the exit status of the command.
fn ended(machine: &str, ending: Option<Ending>) -> ExitCode {
    let how = table::ending_text(&ending.unwrap_or_default());
    output::notice(format_args!("{machine} ended: {how}"));
    DONE
}

/// Prints the summary of a trace.
pub(crate) fn close(printer: &mut Printer, probes: &[Probe]) -> anyhow::Result<()> {
    let rows = printer.tally.rows(probes);
    if printer.format == Format::Json {
        for row in rows {
            let line = serde_json::to_string(&json::Line::Summary(row))?;
            printer.write(&format!("{line}\n"))?;
        }
    } else if !rows.is_empty() {
        output::eprint(format_args!(
            "\n{}",
            summary::text(&rows, printer.tally.dropped)
        ));
    }
    Ok(())
}
