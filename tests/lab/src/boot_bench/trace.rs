//! The time of a VMM's first entry into its guest, from KVM's trace event `kvm_entry`.
//!
//! The event has a trigger that stops tracing at its first occurrence, so that later entries are not slowed
//! down.

use std::time::Duration;

use anyhow::Result;
use hvprobe_lab::measure::tracefs::{self, set};

const TRIGGER: &str = "events/kvm/kvm_entry/trigger";

/// Watches for the first entry into a guest. The trace event is enabled while this exists.
#[derive(Debug)]
pub(crate) struct FirstEntry(());

impl FirstEntry {
    /// Mounts tracefs if need be and sets the event up.
    pub(crate) fn new() -> Result<Self> {
        tracefs::mount()?;
        set("tracing_on", "0")?;
        // The same clock as for the times of a boot.
        set("trace_clock", "mono")?;
        set(TRIGGER, "traceoff:1")?;
        let tracer = Self(());
        set("events/kvm/kvm_entry/enable", "1")?;
        Ok(tracer)
    }

    /// Discards the trace of earlier entries, and traces the next entry.
    pub(crate) fn arm(&self) -> Result<()> {
        set("tracing_on", "0")?;
        set("trace", "")?;
        // A trigger with a count fires only that many times, so it has to be set again.
        set(TRIGGER, "!traceoff:1")?;
        set(TRIGGER, "traceoff:1")?;
        set("tracing_on", "1")
    }

    /// Returns the time of the first entry since [`Self::arm`], on `CLOCK_MONOTONIC`.
    pub(crate) fn seen(&self) -> Result<Option<Duration>> {
        let trace = tracefs::get("trace")?;
        Ok(trace.lines().find_map(time_of_entry))
    }
}

impl Drop for FirstEntry {
    fn drop(&mut self) {
        // The machine is a rig; nothing else depends on its tracing.
        let _ = set("events/kvm/kvm_entry/enable", "0");
        let _ = set(TRIGGER, "!traceoff:1");
    }
}

/// Parses the time in a line such as `  qemu-123  [000] .....  12.345678: kvm_entry: vcpu 0, rip 0xfff0`.
fn time_of_entry(line: &str) -> Option<Duration> {
    let (before, _) = line.split_once(": kvm_entry:")?;
    let seconds: f64 = before.split_whitespace().next_back()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_read_from_an_entry_and_from_nothing_else() {
        let line = " qemu-system-x86-123  [001] ..... 12.500000: kvm_entry: vcpu 0, rip 0xfff0";
        assert_eq!(time_of_entry(line), Some(Duration::from_millis(12_500)));
        assert_eq!(
            time_of_entry("# entries-in-buffer/entries-written: 1/1"),
            None
        );
        assert_eq!(time_of_entry("x: kvm_entry: vcpu 0"), None);
    }
}
