//! Kprobes and kretprobes of the guest itself, set through tracefs: int3s in guest text that are not hvprobe's.
//!
//! Jump optimization is switched off first, except for [`Trigger::Optimized`], because an optimized kprobe replaces
//! its int3 by a jump. Even then, the kernel uses ftrace for a probe on a function's first instruction: give an
//! offset inside the function to get an int3. A kretprobe has an int3 at the entry only if ftrace is not used
//! there.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::calls::{self, Call};
use crate::{files, sys};

pub(crate) const TRACEFS: &str = "/sys/kernel/tracing";
const OPTIMIZATION: &str = "/proc/sys/debug/kprobes-optimization";
/// The guest's kprobes, each with its state.
const LIST: &str = "/sys/kernel/debug/kprobes/list";
/// Limit for the time until a kprobe is optimized.
const PATIENCE: Duration = Duration::from_secs(60);
const GROUP: &str = "workload";

/// What triggers an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trigger {
    /// Reaching the instruction, by an int3.
    Entry,
    /// Reaching the instruction, by the jump that replaces the kernel's int3.
    Optimized,
    /// The function's return.
    Return,
}

impl Trigger {
    /// Returns the start of the event's definition. It sets `maxactive` for kretprobes: by default, a kernel that
    /// is not preemptible follows at most as many calls at a time as it has CPUs.
    fn kind(self) -> &'static str {
        match self {
            Self::Entry | Self::Optimized => "p",
            Self::Return => "r16",
        }
    }

    pub(crate) fn event(self) -> &'static str {
        match self {
            Self::Entry | Self::Optimized => "own",
            Self::Return => "own_return",
        }
    }
}

/// Counts of an event in `kprobe_profile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

/// An event that was set. It is disabled at first, and removed when dropped.
#[derive(Debug)]
pub(crate) struct OwnEvent {
    trigger: Trigger,
    /// Whether each hit records the kernel's stack.
    stacks: bool,
}

impl OwnEvent {
    /// Sets the event at `place` (`NAME[+OFFSET]`, and fetch arguments).
    pub(crate) fn set(trigger: Trigger, place: &str) -> io::Result<Self> {
        if Path::new(OPTIMIZATION).exists() {
            let on = trigger == Trigger::Optimized;
            files::write(OPTIMIZATION, if on { "1" } else { "0" })?;
        }
        let (kind, event) = (trigger.kind(), trigger.event());
        command(&format!("{kind}:{GROUP}/{event} {place}"))?;
        Ok(Self {
            trigger,
            stacks: false,
        })
    }

    /// Sets the filter that decides which hits make an event.
    pub(crate) fn filter(&self, filter: &str) -> io::Result<()> {
        let path = format!("{TRACEFS}/events/{GROUP}/{}/filter", self.trigger.event());
        files::write(&path, filter)
    }

    /// Makes each hit record the kernel's stack, or stops that.
    pub(crate) fn record_stacks(&mut self, on: bool) -> io::Result<()> {
        let path = format!("{TRACEFS}/events/{GROUP}/{}/trigger", self.trigger.event());
        files::write(&path, if on { "stacktrace" } else { "!stacktrace" })?;
        self.stacks = on;
        Ok(())
    }

    pub(crate) fn enable(&self, on: bool) -> io::Result<()> {
        let path = format!("{TRACEFS}/events/{GROUP}/{}/enable", self.trigger.event());
        files::write(&path, if on { "1" } else { "0" })
    }

    /// Waits until the kernel has optimized the event, which must be enabled. Does nothing unless the trigger is
    /// [`Trigger::Optimized`]. The kernel optimizes an event some time after it was enabled, and reports that only
    /// in its list of kprobes.
    pub(crate) fn settle(&self) -> io::Result<()> {
        if self.trigger != Trigger::Optimized {
            return Ok(());
        }
        if !Path::new(LIST).exists() {
            sys::mount(c"debugfs", c"/sys/kernel/debug")?;
        }
        let since = Instant::now();
        while !files::read(LIST)?.contains("[OPTIMIZED]") {
            if since.elapsed() > PATIENCE {
                return Err(io::Error::other("the kernel does not optimize its kprobe"));
            }
            sys::moment();
        }
        Ok(())
    }

    /// Returns the counts since the event was set.
    pub(crate) fn profile(&self) -> io::Result<Profile> {
        let path = format!("{TRACEFS}/kprobe_profile");
        let event = self.trigger.event();
        parse_profile(&files::read(&path)?, event)
            .ok_or_else(|| io::Error::other(format!("{path} has no line for {event}")))
    }
}

impl Drop for OwnEvent {
    fn drop(&mut self) {
        // An event with a trigger cannot be removed.
        let quiet = match self.stacks {
            true => self.record_stacks(false),
            false => Ok(()),
        };
        let removed = quiet
            .and_then(|()| self.enable(false))
            .and_then(|()| command(&format!("-:{GROUP}/{}", self.trigger.event())));
        if let Err(error) = removed {
            eprintln!("workload: {error}");
        }
    }
}

/// Sets an event on `symbol`. In each of `rounds` rounds, enables it, makes `count` calls of `getpgid` and
/// disables it. Prints the number of calls, and the hits and misses of all rounds.
pub(crate) fn run(
    trigger: Trigger,
    symbol: &str,
    count: u64,
    rounds: u64,
) -> Result<(), Box<dyn Error>> {
    let event = OwnEvent::set(trigger, symbol)?;
    for _ in 0..rounds {
        event.enable(true)?;
        calls::make(Call::Getpgid, count)?;
        event.enable(false)?;
    }
    let Profile { hits, misses } = event.profile()?;
    println!("calls: {}", count * rounds);
    println!("kprobe_profile: {hits} {misses}");
    Ok(())
}

fn command(line: &str) -> io::Result<()> {
    let path = format!("{TRACEFS}/kprobe_events");
    let mut file = OpenOptions::new()
        .append(true)
        .open(&path)
        .map_err(|error| files::named(&path, &error))?;
    file.write_all(line.as_bytes()).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("kprobe_events refused `{line}`: {error}"),
        )
    })
}

/// Finds the event's line: name, hits, misses.
fn parse_profile(text: &str, event: &str) -> Option<Profile> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(event)).then_some(())?;
        Some(Profile {
            hits: words.next()?.parse().ok()?,
            misses: words.next()?.parse().ok()?,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_line_of_our_event_is_found_among_others() {
        let text = "  p_vfs_read_0     7   0\n  own_return  5 5\n  own    1000    3\n";
        let expected = Profile {
            hits: 1000,
            misses: 3,
        };
        assert_eq!(parse_profile(text, "own"), Some(expected));
    }

    #[test]
    fn profile_without_our_event_is_none() {
        assert_eq!(parse_profile("  other 1 2\n", "own"), None);
    }
}
