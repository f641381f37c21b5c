//! `hvprobe vm list --watch`: prints machines as they appear, change and disappear.

use std::collections::HashMap;
use std::process::ExitCode;

use hvprobe_proto::v1::WatchMachinesRequest;
use hvprobe_proto::v1::watch_machines_response::What;

use crate::client::Client;
use crate::failure::{DONE, INTERRUPTED, Refused, answered};
use crate::output::{self, json, table};
use crate::terminal::signals::Interrupt;

/// Prints changes until the server or the user ends the command.
pub(crate) async fn watch(
    mut client: Client,
    labels: HashMap<String, String>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut interrupt = Interrupt::install()?;
    let request = WatchMachinesRequest {
        labels,
        read_mask: None,
    };
    let mut watched = answered(client.machines.watch_machines(request).await)?;
    loop {
        let message = tokio::select! {
            message = watched.message() => message.map_err(Refused::from)?,
            () = interrupt.asked() => return Ok(ExitCode::from(INTERRUPTED)),
        };
        let Some(message) = message else {
            return Ok(DONE);
        };
        match message.what {
            Some(What::Machine(machine)) if json => json::print(&json::Shown(&machine))?,
            Some(What::Machine(machine)) => output::print(&table::machine(&machine))?,
            Some(What::Gone(gone)) if json => json::print(&json::Shown(&gone))?,
            Some(What::Gone(gone)) => output::print(&table::gone(&gone))?,
            // Messages of newer servers that this client does not know are also ignored.
            Some(What::AllTold(_)) | None => {}
        }
    }
}
