//! Programs that run under `timeout`, which ends them if their test hangs.

use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

/// Sends `signal` to the program that `timeout` runs.
///
/// The signal does not go to `timeout` itself, for two reasons. If `timeout` is killed, it leaves the program
/// running. If `timeout` gets a signal soon after its start, it may not know the program's id yet, even if the
/// program has been running for a while.
pub(crate) fn signal(timeout: &Child, signal: Signal) {
    let children = format!("/proc/{0}/task/{0}/children", timeout.id());
    // There are no children if the program has ended.
    let children = std::fs::read_to_string(children).unwrap_or_default();
    for child in children
        .split_whitespace()
        .filter_map(|child| child.parse().ok())
    {
        if let Some(child) = Pid::from_raw(child) {
            // The program may end at this moment.
            let _gone = kill_process(child, signal);
        }
    }
}
