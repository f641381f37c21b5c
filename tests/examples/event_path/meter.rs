//! Resources used by a process.

use std::time::Duration;

use anyhow::{Context as _, Result};

/// Makes the kernel kill this process when its parent ends.
pub(crate) fn end_with_parent() -> Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(
        rustix::process::Signal::KILL,
    ))?)
}

/// Returns CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn now_ns() -> Result<u64> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let time = Duration::try_from(time).context("an odd clock")?;
    Ok(u64::try_from(time.as_nanos())?)
}

/// Returns the CPU time of this process so far.
pub(crate) fn cpu_microseconds() -> Result<u64> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let time = Duration::try_from(time).context("an odd clock")?;
    Ok(u64::try_from(time.as_micros())?)
}

/// Returns the peak memory of this process (`VmHWM` of proc_pid_status(5)).
pub(crate) fn peak_kibibytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no peak of memory is told")?.parse()?)
}
