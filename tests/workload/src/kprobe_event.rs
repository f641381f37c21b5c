//! The guest's own kprobe, set through tracefs: an int3 in guest text that is not hvprobe's.
//!
//! Jump optimization is switched off first, because an optimized kprobe replaces its int3 by a
//! jump. The kernel still serves a probe on a function's first instruction by ftrace; give an
//! offset inside the function to get an int3.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use crate::calls::{self, Call};

const TRACEFS: &str = "/sys/kernel/tracing";
const OPTIMIZATION: &str = "/proc/sys/debug/kprobes-optimization";
const GROUP: &str = "workload";
const EVENT: &str = "own";

/// Probes `symbol` (`NAME[+OFFSET]`), makes `count` calls of `getpgid`, prints hits and misses.
pub(crate) fn run(symbol: &str, count: u64) -> Result<(), Box<dyn Error>> {
    if Path::new(OPTIMIZATION).exists() {
        fs::write(OPTIMIZATION, "0").map_err(named(OPTIMIZATION))?;
    }
    command(&format!("p:{GROUP}/{EVENT} {symbol}"))?;
    let counted = enable(true).and_then(|()| {
        calls::repeat(Call::Getpgid, count)?;
        profile()
    });
    enable(false)?;
    command(&format!("-:{GROUP}/{EVENT}"))?;
    let (hits, misses) = counted?;
    println!("kprobe_profile: {hits} {misses}");
    Ok(())
}

fn command(line: &str) -> Result<(), Box<dyn Error>> {
    let path = format!("{TRACEFS}/kprobe_events");
    let mut file = OpenOptions::new()
        .append(true)
        .open(&path)
        .map_err(named(&path))?;
    file.write_all(line.as_bytes())
        .map_err(|error| format!("kprobe_events refused `{line}`: {error}").into())
}

fn enable(on: bool) -> Result<(), Box<dyn Error>> {
    let path = format!("{TRACEFS}/events/{GROUP}/{EVENT}/enable");
    fs::write(&path, if on { "1" } else { "0" }).map_err(|error| named(&path)(error).into())
}

/// Reads the event's line of `kprobe_profile`: name, hits, misses.
fn profile() -> Result<(u64, u64), Box<dyn Error>> {
    let path = format!("{TRACEFS}/kprobe_profile");
    let text = fs::read_to_string(&path).map_err(named(&path))?;
    parse_profile(&text).ok_or_else(|| format!("{path} has no line for {EVENT}").into())
}

fn parse_profile(text: &str) -> Option<(u64, u64)> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(EVENT)).then_some(())?;
        Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    })
}

fn named(path: &str) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{path}: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_line_of_our_event_is_found_among_others() {
        let text = "  p_vfs_read_0     7   0\n  own    1000    3\n";
        assert_eq!(parse_profile(text), Some((1000, 3)));
    }

    #[test]
    fn profile_without_our_event_is_none() {
        assert_eq!(parse_profile("  other 1 2\n"), None);
    }
}
