//! `hvprobe syms`: lists symbols of a guest's kernel.

use std::process::ExitCode;

use anyhow::bail;
use hvprobe_proto::v1::ListSymbolsRequest;
use hvprobe_spec::bounded;

use crate::client::Client;
use crate::failure::{DONE, Refused, answered};
use crate::options::command_line::Syms;
use crate::output::{self, json, table};

pub(crate) async fn syms(args: Syms) -> anyhow::Result<ExitCode> {
    let (mut client, machine) = Client::on_machine(&args.on).await?;
    if !args.json
        && let Some(offset) = client.get_machine(machine.clone()).await?.kernel_offset
    {
        // As in the kernel's panic message.
        output::notice(format_args!("Kernel Offset: {offset:#x}"));
    }
    let request = ListSymbolsRequest {
        machine,
        pattern: args.pattern.clone(),
        limit: args.limit.unwrap_or(0),
        ..Default::default()
    };
    let mut stream = answered(client.symbols.list_symbols(request).await)?;
    let mut found = false;
    while let Some(piece) = stream.message().await.map_err(Refused::from)? {
        for symbol in &piece.symbols {
            found = true;
            if args.json {
                json::print(&json::Shown(symbol))?;
            } else {
                output::print(&table::symbol(symbol))?;
            }
        }
    }
    if !found {
        bail!("no symbol matches `{}`", bounded(&args.pattern));
    }
    Ok(DONE)
}
