//! What happens while a rig runs a job, and how the job ended.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

/// Receives the events of the steps while these run.
pub(crate) trait Listener {
    /// Step number `step` starts.
    fn begin(&mut self, _step: usize) {}
    /// The running step printed these bytes.
    fn output(&mut self, bytes: &[u8]) -> Result<()>;
    /// The step ended. A program that signal N ended has the status 128 + N.
    fn end(&mut self, _step: usize, _status: u8) {}
}

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Exit status of each step; `None` for a step that did not end.
    pub(crate) statuses: Vec<Option<u8>>,
    pub(crate) finish: Finish,
    /// The serial log, if it was kept.
    pub(crate) log: Option<PathBuf>,
}

/// Whether a job ran to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// All steps ran.
    Complete,
    /// The job's time limit has passed.
    TimedOut,
    /// The lab received this signal, or the user left.
    Interrupted(i32),
    /// The rig ended before its steps had ended, for this reason.
    Broken(String),
}

/// Returns the reason for which `who`, a rig or a program on this machine, was ended after it printed nothing for
/// `silence`.
pub(crate) fn stood_still(who: &str, silence: Option<Duration>) -> String {
    let seconds = silence.unwrap_or_default().as_secs();
    format!("{who} stood still: nothing printed for {seconds} s")
}

/// Returns the exit status of the lab.
pub(crate) fn status(is_good: bool) -> ExitCode {
    match is_good {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
