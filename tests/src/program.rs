//! The program `hvprobe` as a user has it.
//!
//! Every wait is for a line or for the end of a program, and is bounded: a [`Program`] that takes too long
//! is killed, which ends its lines.

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

/// What one program may take; Bochs needs most of it for a boot.
#[must_use]
pub fn patience() -> Duration {
    Duration::from_secs(match env::var("HVPROBE_RIG").as_deref() {
        Ok("bochs") => 600,
        _ => 90,
    })
}

/// A running `hvprobe`, the leader of a process group of its own.
#[derive(Debug)]
pub struct Program {
    words: String,
    child: Child,
    out: Receiver<String>,
    err: Receiver<String>,
    /// Kills the program after a while, unless the sender is dropped first; returns whether it did.
    watchdog: Option<(Sender<()>, JoinHandle<bool>)>,
}

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Nothing where a signal ended it.
    pub status: Option<i32>,
    /// Lines of standard output that were not taken before.
    pub out: Vec<String>,
    /// The same of standard error.
    pub err: Vec<String>,
}

impl Program {
    /// Starts `hvprobe` with these arguments; a guest that it boots is one whose boot is
    /// [short](rig::short).
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
        // A server is there for all of its test, in which others wait one after the other.
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

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends it `signal`.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for a line on standard output that has `text` in it.
    pub fn wait_out(&self, text: &str) -> String {
        let line = self.out.iter().find(|line| line.contains(text));
        line.unwrap_or_else(|| {
            let told: Vec<_> = self.err.iter().collect();
            panic!("`{}` never printed {text:?}: {told:#?}", self.words)
        })
    }

    /// Waits for a line on standard error that has `text` in it.
    pub fn wait_err(&self, text: &str) -> String {
        let line = self.err.iter().find(|line| line.contains(text));
        line.unwrap_or_else(|| panic!("`{}` never told {text:?}", self.words))
    }

    /// Waits for its end.
    #[must_use]
    pub fn finish(mut self) -> Finished {
        let (out, err) = (self.out.iter().collect(), self.err.iter().collect());
        // Until it is reaped, the number that the watchdog knows is no other program's.
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
        // Both do nothing to a program that has been reaped.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The lines of `pipe`, which is emptied whether they are looked at or not.
fn lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines() {
            // Whoever looked may be gone.
            let _unread = sender.send(line.unwrap());
        }
    });
    receiver
}

/// Runs `hvprobe` to its end.
#[must_use]
pub fn hvprobe(words: &[&str]) -> Finished {
    Program::start(words).finish()
}

/// Runs `hvprobe`, which has to succeed, and returns its standard output.
#[expect(clippy::must_use_candidate, reason = "that it succeeds is often all")]
pub fn ok(words: &[&str]) -> Vec<String> {
    let finished = hvprobe(words);
    assert_eq!(finished.status, Some(0), "{words:?}: {finished:#?}");
    finished.out
}
