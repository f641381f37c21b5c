//! How long it takes from one function of the guest's kernel to another, as that kernel's own probes have it: a
//! kprobe and a kretprobe event, traced by the monotonic clock.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

use crate::files;
use crate::kprobe_event::{OwnEvent, TRACEFS, Trigger};

/// The kernel's own events on a function; removed when dropped.
#[derive(Debug)]
pub(crate) struct OwnCalls {
    entry: OwnEvent,
    back: OwnEvent,
}

impl OwnCalls {
    /// Traces what is between an entry of `from` and the next return of `to`, in threads that call both in turn, from
    /// now on.
    pub(crate) fn trace(from: &str, to: &str) -> io::Result<Self> {
        let calls = Self {
            entry: OwnEvent::set(Trigger::Entry, from)?,
            back: OwnEvent::set(Trigger::Return, to)?,
        };
        // Forgets what was traced before, too.
        files::write(&format!("{TRACEFS}/trace_clock"), "mono")?;
        calls.entry.enable(true)?;
        calls.back.enable(true)?;
        Ok(calls)
    }

    /// The durations of all calls since it was asked last, of each thread in their order.
    pub(crate) fn take(&self) -> io::Result<BTreeMap<i32, VecDeque<Duration>>> {
        let path = format!("{TRACEFS}/trace");
        let durations = durations(&files::read(&path)?);
        // Empties it.
        files::write(&path, "\n")?;
        Ok(durations)
    }
}

/// Lines are `COMM-TID [CPU] FLAGS SECONDS.MICROSECONDS: EVENT: (…)`, in the order of their times, which may not be
/// that of what happened where the clocks of two processors are apart. So the first return of a thread is of its
/// first entry, and so on.
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

/// The thread, when, and the event.
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
    fn durations_are_told_of_each_thread_alone() {
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
        let told = durations(trace);
        assert_eq!(told[&71], [10_001, 7].map(Duration::from_micros));
        assert_eq!(told[&72], [0, 1_000_200].map(Duration::from_micros));
        assert_eq!(told.len(), 2);
    }
}
