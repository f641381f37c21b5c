//! Threads and processes on all CPUs that make a random mix of calls, counted by kind.
//!
//! While the workers are parked, the counters are exact and complete: every call that began has ended and is
//! counted. Half of the workers are threads of one process, half are processes; in each half, every second worker
//! moves between the CPUs.

mod gate;
mod kind;

use std::error::Error;
use std::ffi::CString;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::child::Child;
use crate::shared::{Shareable, Shared};
use gate::Gate;
use kind::{Counts, Habit, Kind, Worker};

/// Directory of the workers' files.
const FOLDER: &str = "/tmp/workload-stress";
const MAX_WORKERS: usize = 64;

#[derive(Debug)]
struct State {
    gate: Gate,
    counts: [Counts; MAX_WORKERS],
}

// SAFETY: a struct of atomics.
unsafe impl Shareable for State {}

/// Duration of a stress that no director controls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Seconds(u64),
    /// Number of steps of every worker.
    Steps(u64),
}

impl Length {
    /// Parses `30s` or a number of steps.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.strip_suffix('s') {
            Some(seconds) => seconds.parse().ok().map(Self::Seconds),
            None => text.parse().ok().map(Self::Steps),
        }
    }
}

/// Runs a stress for `length` and prints the counters.
pub(crate) fn for_length(length: Length, seed: u64, workers: usize) -> Result<(), Box<dyn Error>> {
    with_workers(seed, workers, |state| {
        match length {
            Length::Seconds(seconds) => {
                state.gate.start(None);
                thread::sleep(Duration::from_secs(seconds));
            }
            Length::Steps(steps) => state.gate.start(Some(steps)),
        }
        state.gate.settle(workers)?;
        print(&state.counts);
        Ok(())
    })
}

/// Runs a stress as directed by lines on stdin: `go` and `stop`, `go STEPS`, `end` (or the end of the input).
/// Prints the counters and `ready` first, and after every stretch the counters and `stretch N is over`.
pub(crate) fn directed(seed: u64, workers: usize) -> Result<(), Box<dyn Error>> {
    with_workers(seed, workers, |state| {
        print(&state.counts);
        println!("ready");
        let mut stretch = 0;
        for line in io::stdin().lines() {
            let line = line?;
            match Order::parse(&line).ok_or_else(|| format!("cannot {line:?}"))? {
                Order::Go(Some(steps)) => state.gate.start(Some(steps)),
                Order::Go(None) => {
                    state.gate.start(None);
                    println!("going");
                    continue;
                }
                Order::Stop => {}
                Order::End => break,
            }
            state.gate.settle(workers)?;
            stretch += 1;
            print(&state.counts);
            println!("stretch {stretch} is over");
        }
        Ok(())
    })
}

/// A line from the director.
#[derive(Debug, PartialEq, Eq)]
enum Order {
    Go(Option<u64>),
    Stop,
    End,
}

impl Order {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match *words {
            ["go"] => Some(Self::Go(None)),
            ["go", steps] => steps.parse().ok().map(|steps| Self::Go(Some(steps))),
            ["stop"] => Some(Self::Stop),
            ["end"] => Some(Self::End),
            _ => None,
        }
    }
}

/// Prints `SYMBOL: N` for each kind, where N is the number of all calls since the start.
fn print(counts: &[Counts]) {
    for kind in Kind::ALL {
        let total: u64 = counts
            .iter()
            .map(|worker| worker[kind as usize].load(Ordering::Acquire))
            .sum();
        println!("{}: {total}", kind.symbol());
    }
}

/// Starts the workers, waits until they are parked, calls `direct`, and ends them.
fn with_workers(
    seed: u64,
    workers: usize,
    direct: impl FnOnce(&State) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    if !(1..=MAX_WORKERS).contains(&workers) {
        return Err(format!("1 to {MAX_WORKERS} workers are possible").into());
    }
    let path = kind::winding_path(Path::new(FOLDER))?;
    let state = Shared::<State>::new()?;
    let processes: Vec<usize> = (0..workers).filter(|index| index % 4 >= 2).collect();
    let mut children = Vec::new();
    // Forks before there are threads.
    for index in processes {
        let path = path.clone();
        children.push(Child::start(|| work(index, seed, &state, path))?);
    }
    let directed = thread::scope(|scope| {
        for index in (0..workers).filter(|index| index % 4 < 2) {
            let (state, path) = (&*state, path.clone());
            // The worker prints its error, and the gate knows that it failed.
            scope.spawn(move || work(index, seed, state, path));
        }
        let directed = state
            .gate
            .settle(workers)
            .map_err(Into::into)
            .and_then(|()| direct(&state));
        state.gate.end();
        directed
    });
    for child in children {
        let ended = child.end();
        if directed.is_ok() {
            ended?.succeeded()?;
        }
    }
    directed
}

fn work(index: usize, seed: u64, state: &State, path: CString) -> io::Result<()> {
    let habit = if index.is_multiple_of(2) {
        Habit::Stays
    } else {
        Habit::Moves
    };
    let worked = Worker::new(index, seed, habit, &state.counts[index], path)
        .inspect_err(|_| state.gate.fail())
        .and_then(|mut worker| state.gate.work(|| worker.step()));
    worked.inspect_err(|error| eprintln!("workload: worker {index}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_seconds_or_steps() {
        assert_eq!(Length::parse("30s"), Some(Length::Seconds(30)));
        assert_eq!(Length::parse("1000"), Some(Length::Steps(1000)));
        assert_eq!(Length::parse("fast"), None);
    }

    #[test]
    fn orders_are_read() {
        assert_eq!(Order::parse("go"), Some(Order::Go(None)));
        assert_eq!(Order::parse(" go 20 "), Some(Order::Go(Some(20))));
        assert_eq!(Order::parse("stop"), Some(Order::Stop));
        assert_eq!(Order::parse("end"), Some(Order::End));
        assert_eq!(Order::parse("go fast"), None);
        assert_eq!(Order::parse(""), None);
    }
}
