//! Runs the program `hvprobe` as a user does.
//!
//! Every wait is for a line or for the end of a program. A [`Program`] that takes too long is killed, which
//! ends its lines, so every wait is bounded.

#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a helper that cannot go on fails its test"
)]

use std::env;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::rig;

/// Returns the time limit of one program; Bochs needs most of it for a boot.
#[must_use]
pub fn patience() -> Duration {
    Duration::from_secs(match env::var("HVPROBE_RIG").as_deref() {
        Ok("bochs") => 600,
        _ => 90,
    })
}

/// A running `hvprobe`, the leader of its own process group.
#[derive(Debug)]
pub struct Program {
    words: String,
    child: Child,
    out: Receiver<String>,
    err: Receiver<String>,
    /// Kills the program after its time limit, unless the sender is dropped before. The thread returns whether it
    /// has killed the program.
    watchdog: Option<(Sender<()>, JoinHandle<bool>)>,
}

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Exit status; `None` if a signal ended the program.
    pub status: Option<i32>,
    /// Lines of standard output that were not read before.
    pub out: Vec<String>,
    /// Lines of standard error that were not read before.
    pub err: Vec<String>,
}

impl Program {
    /// Starts `hvprobe` with these arguments. Any guest that it boots has a [short](rig::short) boot.
    #[must_use]
    pub fn start(words: &[&str]) -> Self {
        let (command, options) = words.split_at(match words {
            ["run", ..] => 1,
            ["vm", "boot", ..] => 2,
            _ => words.len(),
        });
        let quickly = rig::quickly();
        let short = match options {
            [] => &[][..],
            _ => &quickly,
        };
        let mut child = Command::new("hvprobe")
            .args([command, short, options].concat())
            .env_remove("HVPROBE_SOCKET")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let pid = Pid::from_child(&child);
        // A server runs for its whole test, in which other programs run one after the other.
        let limit = match words.first() {
            Some(&"serve") => 2 * patience(),
            _ => patience(),
        };
        let (stop, stopped) = mpsc::channel::<()>();
        let watchdog = thread::spawn(move || {
            let expired = stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if expired {
                kill_process(pid, Signal::KILL).unwrap();
            }
            expired
        });
        Self {
            words: words.join(" "),
            out: lines(child.stdout.take().unwrap()),
            err: lines(child.stderr.take().unwrap()),
            child,
            watchdog: Some((stop, watchdog)),
        }
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends `signal` to the program.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for a line on standard output that contains `text`; returns it.
    pub fn wait_out(&self, text: &str) -> String {
        let line = self.out.iter().find(|line| line.contains(text));
        line.unwrap_or_else(|| {
            let stderr: Vec<_> = self.err.iter().collect();
            panic!("`{}` never printed {text:?}: {stderr:#?}", self.words)
        })
    }

    /// Waits for a line on standard error that contains `text`; returns it.
    pub fn wait_err(&self, text: &str) -> String {
        let line = self.err.iter().find(|line| line.contains(text));
        line.unwrap_or_else(|| panic!("`{}` never told {text:?}", self.words))
    }

    /// Waits for the program's end.
    #[must_use]
    pub fn finish(mut self) -> Finished {
        let (out, err) = (self.out.iter().collect(), self.err.iter().collect());
        // Until the program is reaped, no other process can have its id, which the watchdog may use.
        let ended = waitid(
            WaitId::Pid(self.pid()),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        );
        ended.unwrap();
        let expired = self.stop_watchdog();
        let finished = Finished {
            status: self.child.wait().unwrap().code(),
            out,
            err,
        };
        assert!(!expired, "`{}` took too long: {finished:#?}", self.words);
        finished
    }

    fn stop_watchdog(&mut self) -> bool {
        self.watchdog.take().is_some_and(|(stop, watchdog)| {
            drop(stop);
            watchdog.join().unwrap()
        })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.stop_watchdog();
        // Neither has an effect on a program that has been reaped.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Returns the lines of `pipe`, which is read to its end whether or not the lines are taken.
fn lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines() {
            // The receiver may have been dropped.
            let _unread = sender.send(line.unwrap());
        }
    });
    receiver
}

/// Runs `hvprobe` until it ends.
#[must_use]
pub fn hvprobe(words: &[&str]) -> Finished {
    Program::start(words).finish()
}

/// Runs `hvprobe`, asserts that it succeeds, and returns its standard output.
#[expect(clippy::must_use_candidate, reason = "that it succeeds is often all")]
pub fn ok(words: &[&str]) -> Vec<String> {
    let finished = hvprobe(words);
    assert_eq!(finished.status, Some(0), "{words:?}: {finished:#?}");
    finished.out
}
