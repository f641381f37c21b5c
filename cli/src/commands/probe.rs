//! `hvprobe probe`: probes on a machine of a server.

use std::collections::HashSet;
use std::process::ExitCode;
use std::time::Duration;

use hvprobe_proto::v1::{
    self, ArmAllRequest, DisableRequest, DisarmAllRequest, EnableRequest, RegisterRequest,
    SetOptimizationRequest, UnregisterRequest,
};

use tracing::info;

use crate::client::{self, Client};
use crate::definitions::perf_probe::{self, Made};
use crate::definitions::{events_file, probes};
use crate::failure::{DONE, Refused, as_sent, done};
use crate::options::command_line::{Add, ChosenProbes, Probe, Switch};
use crate::output::{self, json, skipped, table};

pub(crate) async fn probe(command: Probe) -> anyhow::Result<ExitCode> {
    match command {
        Probe::Add(add) => {
            let Add {
                on,
                disabled,
                skip_refused,
                hit,
                hold,
                definitions,
                events,
                debug,
                json,
            } = *add;
            let Made {
                definitions,
                theirs,
            } = perf_probe::of_any(&debug, definitions)?;
            let (probes, histograms) = probes::specs(&definitions, &events, disabled, &hit, &hold)?;
            events_file::refuse(&histograms, "`hvprobe probe add`")?;
            let (mut client, machine) = Client::on_machine(&on).await?;
            client.use_debug_info(theirs, &machine).await?;
            let sent = as_sent(&probes, &definitions.origins);
            let request = RegisterRequest {
                machine: machine.clone(),
                probes,
                skip_refused,
                ..Default::default()
            };
            let answer = client.probes.register(request).await;
            let refused = |status| Refused::of_probes(status, &sent);
            let registered = answer.map_err(refused)?.into_inner();
            if let Some(skipped) = skipped::text(&registered.skipped) {
                output::notice(format_args!("{skipped}"));
            }
            info!(
                probes = registered.ids.len(),
                stopped_for = ?Duration::from_nanos(registered.stopped_ns),
                "probes registered"
            );
            let ids: HashSet<u32> = registered.ids.into_iter().collect();
            let mut probes = client.list_probes(&machine).await?;
            probes.retain(|probe| ids.contains(&probe.id));
            list(&probes, json)
        }
        Probe::Remove(chosen) => {
            let (mut client, machine, ids) = choose(&chosen).await?;
            let request = UnregisterRequest { machine, ids };
            done(client.probes.unregister(request).await)
        }
        Probe::Enable(chosen) => {
            let (mut client, machine, ids) = choose(&chosen).await?;
            done(client.probes.enable(EnableRequest { machine, ids }).await)
        }
        Probe::Disable(chosen) => {
            let (mut client, machine, ids) = choose(&chosen).await?;
            done(client.probes.disable(DisableRequest { machine, ids }).await)
        }
        Probe::ArmAll(on) => {
            let (mut client, machine) = Client::on_machine(&on).await?;
            done(client.probes.arm_all(ArmAllRequest { machine }).await)
        }
        Probe::DisarmAll(on) => {
            let (mut client, machine) = Client::on_machine(&on).await?;
            done(client.probes.disarm_all(DisarmAllRequest { machine }).await)
        }
        Probe::Optimization { on, switch } => {
            let (mut client, machine) = Client::on_machine(&on).await?;
            let on = switch == Switch::On;
            let request = SetOptimizationRequest { machine, on };
            done(client.probes.set_optimization(request).await)
        }
        Probe::List { on, owner, json } => {
            let (mut client, machine) = Client::on_machine(&on).await?;
            let owner = owner.unwrap_or_default();
            list(&client.list_probes_of(&machine, &owner).await?, json)
        }
    }
}

async fn choose(chosen: &ChosenProbes) -> anyhow::Result<(Client, String, Vec<u32>)> {
    let (mut client, machine) = Client::on_machine(&chosen.on).await?;
    let probes = client.list_probes(&machine).await?;
    let ids = if chosen.all {
        probes.iter().map(|probe| probe.id).collect()
    } else {
        client::choose(&probes, &chosen.probes)?
    };
    Ok((client, machine, ids))
}

fn list(probes: &[v1::Probe], json: bool) -> anyhow::Result<ExitCode> {
    if json {
        for probe in probes {
            json::print(&json::Shown(probe))?;
        }
    } else {
        output::print(&table::probes(probes))?;
    }
    Ok(DONE)
}
