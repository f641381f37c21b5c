//! `hvprobe doctor`: reports the abilities of a host, on the terminal or, for a bug report, in a file.

mod init;
mod private;
mod report;
mod smoke;

use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;

use hvprobe_proto::v1::{CatchMode, Machine, ReportRequest, ReportResponse, Verdict};

use crate::client::{Client, InProcess};
use crate::definitions::kernels;
use crate::failure::{DONE, FAILED, Refused, answered};
use crate::options::command_line::Doctor;
use crate::options::server::{ServerAt, SocketAt};
use crate::output::{self, json, table};
use crate::terminal::progress::Progress;
use private::Names;
use smoke::Smoke;

pub(crate) async fn doctor(args: Doctor) -> anyhow::Result<ExitCode> {
    if args.socket.is_none() && args.connect.is_none() {
        let (server, mut client) = InProcess::start().await?;
        let outcome = match &args.report {
            Some(file) => write_report(&mut client, file, args.kernel.as_deref()).await,
            None => report(&mut client, args.json).await,
        };
        server.stop().await?;
        return outcome;
    }
    let server = ServerAt {
        at: SocketAt {
            socket: args.socket,
        },
        connect: args.connect,
        token_file: args.token_file,
    };
    report(&mut Client::connect(&server).await?, args.json).await
}

async fn ask(client: &mut Client) -> Result<ReportResponse, Refused> {
    answered(client.host.report(ReportRequest {}).await)
}

/// Writes all information for a bug report into `file`. The smoke run uses `kernel`, or the newest kernel of
/// this machine.
async fn write_report(
    client: &mut Client,
    file: &Path,
    kernel: Option<&Path>,
) -> anyhow::Result<ExitCode> {
    let chosen = match kernel {
        Some(kernel) => Ok(std::path::absolute(kernels::named(kernel)?)?),
        None => kernels::newest(),
    };
    let describe = || format!("cannot write {}", file.display());
    // A file that cannot be written is reported before any work is done.
    File::create(file).with_context(describe)?;
    let host = ask(client).await?;
    let smoke = match chosen {
        _ if !host.guests_can_run => Smoke::NotTried("guests cannot run here".to_owned()),
        Err(why) => Smoke::NotTried(format!("{why:#}")),
        Ok(kernel) => {
            let what = format!("trying {}", kernel.display());
            let _progress = Progress::begin(what, false);
            smoke::run(client, &kernel).await
        }
    };
    let text = report::text(&host, &smoke, &Names::of_this_machine());
    fs::write(file, text).with_context(describe)?;
    output::notice(format_args!("the report is in {}", file.display()));
    Ok(verdict(&host))
}

fn verdict(host: &ReportResponse) -> ExitCode {
    if host.guests_can_run {
        DONE
    } else {
        ExitCode::from(FAILED)
    }
}

/// Returns the reason why the newly booted `machine` will not reach user space, in one line. Returns `None` if
/// nothing indicates that.
///
/// The report takes a while, so it is requested only if KVM emulates the guest's kernel. KVM does that only on
/// hosts that cannot run Linux guests.
pub(crate) async fn doubt(client: &mut Client, machine: &Machine) -> Option<String> {
    if machine.catch_mode() != CatchMode::EmulationExit {
        return None;
    }
    // Without a report there is no warning.
    let report = ask(client).await.ok()?;
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
        "this host cannot run Linux guests{why}; `hvprobe doctor` shows why"
    ))
}

async fn report(client: &mut Client, json: bool) -> anyhow::Result<ExitCode> {
    let report = ask(client).await?;
    if json {
        for finding in &report.findings {
            json::print(&json::Shown(finding))?;
        }
    } else {
        output::print(&table::findings(&report.findings))?;
        output::print(match report.guests_can_run {
            true => "\nLinux guests can run here.",
            false => "\nLinux guests cannot run here.",
        })?;
    }
    Ok(verdict(&report))
}
