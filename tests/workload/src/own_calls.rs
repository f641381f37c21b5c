//! Measures the time from one function of the guest's kernel to another by that kernel's own probes: a kprobe
//! and a kretprobe event, traced with the monotonic clock.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

use crate::files;
use crate::kprobe_event::{OwnEvent, TRACEFS, Trigger};

/// The kernel's own events on two functions; removed when dropped.
#[derive(Debug)]
pub(crate) struct OwnCalls {
    entry: OwnEvent,
    back: OwnEvent,
}

impl OwnCalls {
    /// Starts tracing the time between an entry of `from` and the next return of `to`, in threads that call
    /// both in turn.
    pub(crate) fn trace(from: &str, to: &str) -> io::Result<Self> {
        let calls = Self {
            entry: OwnEvent::set(Trigger::Entry, from)?,
            back: OwnEvent::set(Trigger::Return, to)?,
        };
        // This also clears the trace.
        files::write(&format!("{TRACEFS}/trace_clock"), "mono")?;
        calls.entry.enable(true)?;
        calls.back.enable(true)?;
        Ok(calls)
    }

    /// Returns the durations of all calls since the last call of this method, for each thread in order.
    pub(crate) fn take(&self) -> io::Result<BTreeMap<i32, VecDeque<Duration>>> {
        let path = format!("{TRACEFS}/trace");
        let durations = durations(&files::read(&path)?);
        // Clears the trace.
        files::write(&path, "\n")?;
        Ok(durations)
    }
}

/// Computes durations from a trace. Lines are `COMM-TID [CPU] FLAGS SECONDS.MICROSECONDS: EVENT: (…)`, ordered by
/// time. If the clocks of two processors differ, the events may have happened in another order. So the first return
/// of a thread is matched with its first entry, and so on.
fn durations(trace: &str) -> BTreeMap<i32, VecDeque<Duration>> {
    let times = |trigger: Trigger| {
        let mut times: BTreeMap<i32, Vec<Duration>> = BTreeMap::new();
        for (thread, at, event) in trace.lines().filter_map(parse) {
            if event == trigger.event() {
                times.entry(thread).or_default().push(at);
            }
        }
        times
    };
    let mut returns = times(Trigger::Return);
    let of_thread = |(thread, entries): (i32, Vec<Duration>)| {
        let returns = returns.remove(&thread).unwrap_or_default();
        let calls = entries.iter().zip(&returns);
        let durations = calls.map(|(entry, back)| back.saturating_sub(*entry));
        (thread, durations.collect())
    };
    let entries = times(Trigger::Entry);
    entries.into_iter().map(of_thread).collect()
}

/// Returns the thread, the time and the event of a line.
fn parse(line: &str) -> Option<(i32, Duration, &str)> {
    let mut words = line.split_whitespace();
    let (_, thread) = words.next()?.rsplit_once('-')?;
    let time = |word: &str| {
        let (seconds, micros) = word.strip_suffix(':')?.split_once('.')?;
        let micros = Duration::from_micros(micros.parse().ok()?);
        Some(Duration::from_secs(seconds.parse().ok()?) + micros)
    };
    let at = words.find_map(time)?;
    Some((thread.parse().ok()?, at, words.next()?.strip_suffix(':')?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_of_each_thread_alone() {
        let trace = "# tracer: nop\n\
             #           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION\n\
             workload-71      [001] .....    12.000100: own: (do_nanosleep+0x0/0x120)\n\
             workload-72      [001] d....    12.000147: own_return: (hrtimer_nanosleep+0x9b/0x1a0 <- do_nanosleep)\n\
             workload-72      [000] .....    12.000150: own: (do_nanosleep+0x0/0x120)\n\
             workload-72      [000] .....    12.000200: own: (do_nanosleep+0x0/0x120)\n\
             workload-72      [001] d....    13.000400: own_return: (hrtimer_nanosleep+0x9b/0x1a0 <- do_nanosleep)\n\
             workload-71      [000] d....    12.010101: own_return: (hrtimer_nanosleep+0x9b/0x1a0 <- do_nanosleep)\n\
             workload-71      [000] .....    12.020000: own: (do_nanosleep+0x0/0x120)\n\
             workload-71      [000] d....    12.020007: own_return: (hrtimer_nanosleep+0x9b/0x1a0 <- do_nanosleep)\n";
        let measured = durations(trace);
        assert_eq!(measured[&71], [10_001, 7].map(Duration::from_micros));
        assert_eq!(measured[&72], [0, 1_000_200].map(Duration::from_micros));
        assert_eq!(measured.len(), 2);
    }
}
