//! Upload of files to a server, which may be on another machine.

use std::fs::File;
use std::io::{self, Read as _};
use std::mem;
use std::path::Path;

use anyhow::Context as _;
use hvprobe_proto::v1::UploadDebugInfoRequest;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::connection::Client;
use crate::failure::answered;

/// Number of bytes in a message.
const PART: u64 = 1 << 20;
/// Number of messages that are read ahead.
const AHEAD: usize = 4;

/// Uploads the debug information in `file` to the server, for `machine`.
pub(crate) async fn debug_info(
    client: &mut Client,
    machine: &str,
    file: &Path,
) -> anyhow::Result<()> {
    let unreadable = || format!("cannot read {}", file.display());
    let from = File::open(file).with_context(unreadable)?;
    let (to, parts) = mpsc::channel(AHEAD);
    let first = UploadDebugInfoRequest {
        machine: machine.to_owned(),
        data: Vec::new(),
    };
    let reading = tokio::task::spawn_blocking(move || send(from, first, &to));
    let uploaded = client.sources.upload_debug_info(ReceiverStream::new(parts));
    let uploaded = uploaded.await;
    // A read error cuts the upload short, so the server also reports an error. The read error is the cause, so it
    // is reported first.
    reading.await?.with_context(unreadable)?;
    answered(uploaded)?;
    Ok(())
}

/// Sends the contents of `from` in parts, the first of them in `first`. Stops without an error if the receiver is
/// gone.
fn send(
    mut from: File,
    first: UploadDebugInfoRequest,
    to: &mpsc::Sender<UploadDebugInfoRequest>,
) -> io::Result<()> {
    let mut part = first;
    loop {
        (&mut from).take(PART).read_to_end(&mut part.data)?;
        if part == UploadDebugInfoRequest::default() {
            return Ok(());
        }
        if to.blocking_send(mem::take(&mut part)).is_err() {
            return Ok(());
        }
    }
}
