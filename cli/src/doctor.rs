//! `hvprobe doctor`: what a host can do.

use std::process::ExitCode;

use hvprobe_proto::v1::{CatchMode, Machine, ReportRequest, Verdict};

use crate::args::{Doctor, ServerAt};
use crate::client::Client;
use crate::failure::{DONE, FAILED, Refused};
use crate::in_process::InProcess;
use crate::output::{self, json, table};

pub(crate) async fn doctor(args: Doctor) -> anyhow::Result<ExitCode> {
    match args.socket {
        Some(socket) => {
            let server = ServerAt {
                socket: Some(socket),
            };
            report(Client::connect(&server).await?, args.json).await
        }
        None => {
            let (server, client) = InProcess::start().await?;
            let outcome = report(client, args.json).await;
            server.stop().await?;
            outcome
        }
    }
}

/// Why `machine`, which has just been booted, will not get as far as its user space, in one line;
/// `None` if nothing speaks against it.
///
/// The report takes its time, so it is asked for only where KVM emulates the guest's kernel: hosts
/// that cannot run Linux do, and good ones do not.
pub(crate) async fn doubt(client: &mut Client, machine: &Machine) -> Option<String> {
    if machine.catch_mode() != CatchMode::EmulationExit {
        return None;
    }
    // Without a report there is nothing to warn of.
    let report = client.host.report(ReportRequest {}).await.ok()?;
    let report = report.into_inner();
    if report.guests_can_run {
        return None;
    }
    let bad = report
        .findings
        .iter()
        .find(|finding| finding.verdict() == Verdict::Bad);
    let why = bad.map_or_else(String::new, |finding| {
        format!(" ({}: {})", finding.what, finding.seen)
    });
    Some(format!(
        "warning: this host cannot run Linux guests{why}; `hvprobe doctor` tells more"
    ))
}

async fn report(mut client: Client, json: bool) -> anyhow::Result<ExitCode> {
    let answer = client.host.report(ReportRequest {}).await;
    let report = answer.map_err(Refused::from)?.into_inner();
    if json {
        for finding in &report.findings {
            json::print(&json::Finding::from(finding))?;
        }
    } else {
        output::print(&table::findings(&report.findings))?;
        output::print(match report.guests_can_run {
            true => "\nLinux guests can run here.",
            false => "\nLinux guests cannot run here.",
        })?;
    }
    Ok(if report.guests_can_run {
        DONE
    } else {
        ExitCode::from(FAILED)
    })
}
