//! Programs that `timeout` ends should their test hang.

use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

/// Sends `signal` to what `timeout` runs.
///
/// Killed, `timeout` would leave that behind; and told to end at once, it may not yet know what it runs,
/// though that has been running for a while.
pub(crate) fn signal(timeout: &Child, signal: Signal) {
    let children = format!("/proc/{0}/task/{0}/children", timeout.id());
    // Nobody, if it has ended.
    let children = std::fs::read_to_string(children).unwrap_or_default();
    for child in children
        .split_whitespace()
        .filter_map(|child| child.parse().ok())
    {
        if let Some(child) = Pid::from_raw(child) {
            // It may end at this moment.
            let _gone = kill_process(child, signal);
        }
    }
}
