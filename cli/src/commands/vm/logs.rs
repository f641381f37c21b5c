//! `hvprobe vm logs`: prints the part of a machine's console that the server keeps.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use tokio::time::timeout;

use crate::client::Client;
use crate::failure::{DONE, INTERRUPTED, Refused};
use crate::output;
use crate::terminal::signals::Interrupt;

/// Maximum wait for the next piece of the kept output.
const PATIENCE: Duration = Duration::from_secs(10);

/// Prints the kept output, and with `follow` also new output.
pub(crate) async fn logs(
    mut client: Client,
    machine: String,
    follow: bool,
) -> anyhow::Result<ExitCode> {
    let mut interrupt = Interrupt::install()?;
    let mut pieces = client.console(machine, !follow).await?;
    let plain = io::stdout().is_terminal();
    loop {
        let next = async {
            match follow {
                true => Ok(pieces.message().await),
                false => timeout(PATIENCE, pieces.message()).await,
            }
        };
        let next = tokio::select! {
            next = next => next,
            () = interrupt.asked() => return Ok(ExitCode::from(INTERRUPTED)),
        };
        let Ok(next) = next else {
            bail!("the server does not stop at what it has kept: it is too old for `vm logs`");
        };
        let Some(piece) = next.map_err(Refused::from)? else {
            return Ok(DONE);
        };
        if piece.dropped > 0 {
            let lost = piece.dropped;
            output::notice(format_args!("{lost} bytes of the console were lost"));
        }
        let mut out = io::stdout().lock();
        if plain {
            out.write_all(lines(&piece.data).as_bytes())?;
        } else {
            out.write_all(&piece.data)?;
        }
        out.flush()?;
    }
}

/// Returns `raw` as lines without control characters for the terminal.
fn lines(raw: &[u8]) -> String {
    let lines = raw.split(|&byte| byte == b'\n');
    let lines: Vec<_> = lines
        .map(|line| output::harmless(line.strip_suffix(b"\r").unwrap_or(line)))
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_lines_and_steer_nothing() {
        assert_eq!(lines(b"a\r\n\x1b[2Jb\r\nc"), "a\n?[2Jb\nc");
        assert_eq!(lines(b"a\n"), "a\n");
    }
}
