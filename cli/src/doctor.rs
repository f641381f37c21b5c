//! `hvprobe doctor`: what a host can do.

use std::process::ExitCode;

use hvprobe_proto::v1::ReportRequest;

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
