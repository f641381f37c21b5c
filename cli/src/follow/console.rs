//! A guest's serial console on this terminal.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use hvprobe_proto::v1::{ConsoleOutput, ConsoleWriteRequest};
use tokio::sync::mpsc;

use crate::client::Client;
use crate::failure::{Refused, answered};
use crate::output::harmless;
use crate::terminal::raw::Raw;

/// Ctrl-], which leaves a console, as in telnet and virsh.
const ESCAPE: u8 = 0x1d;
/// Interval after which a full serial port is tried again. The guest empties the port without any notification.
const FULL_PORT: Duration = Duration::from_millis(5);
/// Number of bytes that are kept from the end of the console output.
const TAIL: usize = 64 << 10;

/// Input of the user.
#[derive(Debug, PartialEq, Eq)]
enum Key {
    /// Typed bytes.
    Bytes(Vec<u8>),
    /// Request to leave.
    Leave,
}

/// The console of one machine, connected to standard input and output.
#[derive(Debug)]
pub(crate) struct Console {
    client: Client,
    machine: String,
    output: tonic::Streaming<ConsoleOutput>,
    keys: mpsc::Receiver<Key>,
    /// Typed bytes that the guest's serial port has had no room for yet.
    pending: Vec<u8>,
    _raw: Option<Raw>,
}

/// State of a console after a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// There may be more output and input.
    More,
    /// The user asked to leave.
    Leave,
    /// The guest ended.
    Ended,
}

impl Console {
    /// Connects to the console of `machine`, makes the terminal raw and starts to read it.
    pub(crate) async fn connect(mut client: Client, machine: &str) -> anyhow::Result<Self> {
        let output = client.console(machine.to_owned(), false).await?;
        let raw = Raw::enter().context("cannot make the terminal raw")?;
        if raw.is_some() {
            crate::output::notice(format_args!("connected to the console, Ctrl-] leaves"));
        }
        Ok(Self {
            client,
            machine: machine.to_owned(),
            output,
            keys: keyboard(),
            pending: Vec::new(),
            _raw: raw,
        })
    }

    /// Waits for output of the guest or input of the user, and passes it on. Cancel-safe: a dropped call loses
    /// nothing.
    pub(crate) async fn step(&mut self) -> anyhow::Result<Step> {
        tokio::select! {
            piece = self.output.message() => match piece.map_err(Refused::from)? {
                Some(piece) => {
                    if piece.dropped > 0 {
                        crate::output::notice(format_args!(
                            "{} bytes of the console were lost: this terminal is too slow",
                            piece.dropped
                        ));
                    }
                    let mut out = io::stdout().lock();
                    out.write_all(&piece.data)?;
                    out.flush()?;
                    Ok(Step::More)
                }
                None => Ok(Step::Ended),
            },
            Some(key) = self.keys.recv(), if self.pending.is_empty() => match key {
                Key::Bytes(data) => {
                    self.pending = data;
                    self.write().await
                }
                Key::Leave => Ok(Step::Leave),
            },
            () = tokio::time::sleep(FULL_PORT), if !self.pending.is_empty() => self.write().await,
        }
    }

    /// Writes as many of the pending bytes as the port has room for.
    async fn write(&mut self) -> anyhow::Result<Step> {
        let request = ConsoleWriteRequest {
            machine: self.machine.clone(),
            data: self.pending.clone(),
        };
        let accepted = answered(self.client.machines.console_write(request).await)?.accepted;
        let accepted = usize::try_from(accepted).unwrap_or(usize::MAX);
        self.pending.drain(..accepted.min(self.pending.len()));
        Ok(Step::More)
    }
}

/// Reads standard input on a separate thread, because a read from a terminal cannot be cancelled. The thread
/// ends with the process.
fn keyboard() -> mpsc::Receiver<Key> {
    let (sender, receiver) = mpsc::channel(16);
    thread::spawn(move || {
        let terminal = io::stdin().is_terminal();
        let mut buffer = [0; 1024];
        loop {
            let read = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            for key in keys(buffer.get(..read).unwrap_or_default(), terminal) {
                if sender.blocking_send(key).is_err() {
                    return;
                }
            }
        }
    });
    receiver
}

/// Splits typed bytes into input for the guest and a request to leave. Only a terminal can make that request.
fn keys(typed: &[u8], terminal: bool) -> Vec<Key> {
    let leave = typed.iter().position(|&byte| terminal && byte == ESCAPE);
    let bytes = typed
        .get(..leave.unwrap_or(typed.len()))
        .unwrap_or_default();
    let mut keys = Vec::new();
    if !bytes.is_empty() {
        keys.push(Key::Bytes(bytes.to_vec()));
    }
    if leave.is_some() {
        keys.push(Key::Leave);
    }
    keys
}

/// End of a console's output, for error reports.
#[derive(Debug, Default)]
pub(crate) struct Tail(VecDeque<u8>);

impl Tail {
    /// Reads the console output of `machine` until the machine ends, and keeps the end of the output.
    pub(crate) async fn keep(mut client: Client, machine: String) -> Self {
        let mut tail = Self::default();
        if let Ok(mut output) = client.console(machine, false).await {
            while let Ok(Some(piece)) = output.message().await {
                tail.push(&piece.data);
            }
        }
        tail
    }

    fn push(&mut self, data: &[u8]) {
        self.0.extend(data);
        let excess = self.0.len().saturating_sub(TAIL);
        self.0.drain(..excess);
    }

    /// Returns the kept lines, safe to print.
    pub(crate) fn lines(mut self) -> Vec<String> {
        self.0
            .make_contiguous()
            .split(|&byte| byte == b'\n')
            .map(|line| harmless(line.trim_ascii_end()))
            .filter(|line| !line.is_empty())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_leaves_a_terminal_and_is_a_byte_like_others_in_a_pipe() {
        let typed = b"ls\x1dx";
        assert_eq!(keys(typed, true), [Key::Bytes(b"ls".to_vec()), Key::Leave]);
        assert_eq!(keys(typed, false), [Key::Bytes(typed.to_vec())]);
        assert_eq!(keys(b"\x1d", true), [Key::Leave]);
    }

    #[test]
    fn tail_is_bounded_and_cut_into_harmless_lines() {
        let mut tail = Tail::default();
        for _ in 0..100 {
            tail.push(&[b'x'; 1 << 10]);
        }
        assert_eq!(tail.0.len(), TAIL);
        tail.push(b"\r\none\r\n\r\n\x1b[31mtwo\r\nthree");
        let lines = tail.lines();
        assert!(lines[0].starts_with('x'));
        assert_eq!(lines[1..], ["one", "?[31mtwo", "three"]);
    }
}
