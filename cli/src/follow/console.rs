//! A guest's serial console on this terminal.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use hvprobe_proto::v1::{ConsoleOutput, ConsoleWriteRequest};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, error::TrySendError};

use crate::client::Client;
use crate::failure::{Refused, answered};
use crate::output::harmless;
use crate::terminal::raw::Raw;

/// Ctrl-], which leaves a console, as in telnet and virsh.
const ESCAPE: u8 = 0x1d;
/// Interval after which a full serial port is tried again. The guest empties the port without any notification.
const FULL_PORT: Duration = Duration::from_millis(5);
/// Maximum number of bytes, about, that are still passed on when the user leaves.
const LAST: usize = 4096;
/// Number of bytes that are kept from the end of the console output.
const TAIL: usize = 64 << 10;

/// Maximum number of reads of standard input that wait for the guest. What is typed on a terminal after that is
/// dropped, so that the request to leave is always heard; a pipe waits.
const READS: usize = 1024;

/// The console of one machine, connected to standard input and output.
#[derive(Debug)]
pub(crate) struct Console {
    client: Client,
    machine: String,
    output: tonic::Streaming<ConsoleOutput>,
    typed: mpsc::Receiver<Vec<u8>>,
    leave: Arc<Notify>,
    is_leaving: bool,
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
        let leave = Arc::new(Notify::new());
        Ok(Self {
            client,
            machine: machine.to_owned(),
            output,
            typed: keyboard(Arc::clone(&leave)),
            leave,
            is_leaving: false,
            pending: Vec::new(),
            _raw: raw,
        })
    }

    /// Waits for output of the guest or input of the user, and passes it on. Cancel-safe: a dropped call loses
    /// nothing.
    pub(crate) async fn step(&mut self) -> anyhow::Result<Step> {
        if self.is_leaving {
            return self.take_leave().await;
        }
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
            () = self.leave.notified() => {
                self.is_leaving = true;
                self.take_leave().await
            }
            Some(data) = self.typed.recv(), if self.pending.is_empty() => {
                self.pending = data;
                self.write().await
            }
            () = tokio::time::sleep(FULL_PORT), if !self.pending.is_empty() => self.write().await,
        }
    }

    /// Writes what was typed before the request to leave, as far as the port has room for it.
    async fn take_leave(&mut self) -> anyhow::Result<Step> {
        while self.pending.len() < LAST
            && let Ok(data) = self.typed.try_recv()
        {
            self.pending.extend(data);
        }
        if !self.pending.is_empty() {
            self.write().await?;
        }
        Ok(Step::Leave)
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

/// Reads standard input on a separate thread, because a read from a terminal cannot be cancelled. Notifies `leave`
/// when the user asks to leave. The thread ends with the process.
fn keyboard(leave: Arc<Notify>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(READS);
    thread::spawn(move || {
        let is_terminal = io::stdin().is_terminal();
        let mut buffer = [0; 1024];
        loop {
            let read = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            let typed = buffer.get(..read).unwrap_or_default();
            let (bytes, is_leaving) = split(typed, is_terminal);
            let is_open = match is_terminal {
                _ if bytes.is_empty() => true,
                true => !matches!(
                    sender.try_send(bytes.to_vec()),
                    Err(TrySendError::Closed(_))
                ),
                false => sender.blocking_send(bytes.to_vec()).is_ok(),
            };
            if is_leaving {
                leave.notify_one();
            }
            if !is_open || is_leaving {
                return;
            }
        }
    });
    receiver
}

/// Returns the part of the typed bytes that is input for the guest, and whether the user asks to leave after that
/// input. Only a user at a terminal can ask.
fn split(typed: &[u8], is_terminal: bool) -> (&[u8], bool) {
    match typed.iter().position(|&byte| is_terminal && byte == ESCAPE) {
        Some(end) => (typed.get(..end).unwrap_or_default(), true),
        None => (typed, false),
    }
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
        assert_eq!(split(typed, true), (&b"ls"[..], true));
        assert_eq!(split(typed, false), (&typed[..], false));
        assert_eq!(split(b"\x1d", true), (&b""[..], true));
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
