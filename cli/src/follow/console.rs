//! A guest's serial console on this terminal.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::pin::Pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use hvprobe_proto::v1::{ConsoleOutput, ConsoleWriteRequest, ConsoleWriteResponse};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::{Code, Response, Status, Streaming};

use super::optional_future::or_never;
use crate::client::Client;
use crate::failure::Refused;
use crate::output::harmless;
use crate::terminal::raw::Raw;

/// Ctrl-], which leaves a console, as in telnet and virsh.
const ESCAPE: u8 = 0x1d;
/// Maximum number of reads of standard input that wait for the guest. Keys typed on a terminal after that are
/// dropped, with a beep, so that the request to leave is still read. A pipe is not read any further.
const READS: usize = 1024;
/// Interval after which a full serial port is tried again. The guest empties the port without any notification.
const FULL_PORT: Duration = Duration::from_millis(5);
/// Maximum time for passing on what was typed before the request to leave.
const LAST_INPUT: Duration = Duration::from_millis(200);
/// Number of bytes that are kept from the end of the console output.
const TAIL: usize = 64 << 10;

/// Number of bytes that the guest's serial port has taken.
type Taken = Result<Response<ConsoleWriteResponse>, Status>;

/// The console of one machine, connected to standard input and output.
pub(crate) struct Console {
    client: Client,
    machine: String,
    output: Streaming<ConsoleOutput>,
    typed: mpsc::Receiver<Vec<u8>>,
    leave: Arc<Notify>,
    is_leaving: bool,
    /// Typed bytes that the guest's serial port has had no room for yet.
    pending: Vec<u8>,
    /// Call that writes `pending`. It is kept here, and not awaited in a step, because a step may be dropped.
    write: Option<Pin<Box<dyn Future<Output = Taken> + Send>>>,
    /// Time at which `pending` is written, if no call is under way.
    next: Instant,
    _raw: Option<Raw>,
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console")
            .field("machine", &self.machine)
            .field("pending", &self.pending.len())
            .finish_non_exhaustive()
    }
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
            write: None,
            next: Instant::now(),
            _raw: raw,
        })
    }

    /// Waits for output of the guest or input of the user, and passes it on. Cancel-safe: a dropped call loses
    /// nothing, and writes nothing twice.
    pub(crate) async fn step(&mut self) -> anyhow::Result<Step> {
        if self.is_leaving {
            return Ok(self.take_leave().await);
        }
        let is_idle = self.pending.is_empty() && self.write.is_none();
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
                Ok(self.take_leave().await)
            }
            Some(data) = self.typed.recv(), if is_idle => {
                self.pending = data;
                self.begin_write();
                Ok(Step::More)
            }
            taken = or_never(self.write.as_mut()), if self.write.is_some() => {
                self.write = None;
                self.written(taken)?;
                Ok(Step::More)
            }
            () = sleep_until(self.next), if !is_idle && self.write.is_none() => {
                self.begin_write();
                Ok(Step::More)
            }
        }
    }

    /// Passes on what was typed before the request to leave, if the guest's port takes it soon.
    async fn take_leave(&mut self) -> Step {
        let last = async {
            loop {
                if let Some(write) = &mut self.write {
                    let taken = write.await;
                    self.write = None;
                    if self.written(taken).is_err() {
                        return;
                    }
                }
                if self.pending.is_empty() {
                    let Ok(data) = self.typed.try_recv() else {
                        return;
                    };
                    self.pending = data;
                } else {
                    sleep_until(self.next).await;
                }
                self.begin_write();
            }
        };
        // What the guest does not take is of no use to a user who has left.
        let _in_time = timeout(LAST_INPUT, last).await;
        Step::Leave
    }

    /// Begins to write as many of the pending bytes as the port has room for.
    fn begin_write(&mut self) {
        let request = ConsoleWriteRequest {
            machine: self.machine.clone(),
            data: self.pending.clone(),
        };
        let mut machines = self.client.machines.clone();
        let call = async move { machines.console_write(request).await };
        self.write = Some(Box::pin(call));
    }

    /// Removes the bytes that were written from those that are pending.
    fn written(&mut self, taken: Taken) -> Result<(), Refused> {
        match taken {
            Ok(answer) => {
                let accepted = answer.into_inner().accepted;
                let accepted = usize::try_from(accepted).unwrap_or(usize::MAX);
                self.pending.drain(..accepted.min(self.pending.len()));
                self.next = Instant::now() + FULL_PORT;
                Ok(())
            }
            // The machine has ended. Its last output is still to come.
            Err(status) if status.code() == Code::FailedPrecondition => {
                self.pending.clear();
                Ok(())
            }
            Err(status) => Err(status.into()),
        }
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
                true => match sender.try_send(bytes.to_vec()) {
                    Err(TrySendError::Full(_)) => {
                        // A terminal beeps when it drops keys. If it is gone, nobody hears it.
                        let _gone = io::stdout()
                            .write_all(b"\x07")
                            .and_then(|()| io::stdout().flush());
                        true
                    }
                    sent => sent.is_ok(),
                },
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
