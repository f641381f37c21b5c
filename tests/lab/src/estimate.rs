//! Estimates how long a command will take on this machine, before it begins.
//!
//! Some machines are several times as fast as others. So the lab times a short piece of work on this machine, and
//! scales the time that the command takes on a machine of known speed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::cargo::Workspace;
use crate::process;
use crate::progress;

/// Time of a command on the machine of known speed, which has [`PROCESSORS`] processors and does the [piece]
/// of work in [`PIECE`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Time to build everything that the command needs, including downloads, if nothing is built yet.
    pub(crate) build: Duration,
    /// Time for everything else.
    pub(crate) rest: Duration,
}

const PROCESSORS: u32 = 2;
const PIECE: Duration = Duration::from_millis(100);

/// Prints how long `work` will take. If there is an earlier build, it is not known how much of it has to be built
/// again.
pub(crate) fn say(work: Work, workspace: &Workspace) {
    let processors = u32::try_from(process::processors()).unwrap_or(u32::MAX);
    let speed = piece().as_secs_f64() / PIECE.as_secs_f64();
    let (build, rest) = stretched(work, speed, processors);
    let rest = in_words(rest);
    progress::note(&match workspace.is_built() {
        true => format!("takes about {rest} on this machine, and what is to be built anew"),
        false => format!(
            "takes about {rest} on this machine, and the first time about {} to build",
            in_words(build)
        ),
    });
}

/// Scales the times for the build and for the rest to a machine with `processors`, on which the piece takes `speed`
/// times as long. A build keeps any number of processors busy, the rest only two.
fn stretched(work: Work, speed: f64, processors: u32) -> (Duration, Duration) {
    let share = f64::from(PROCESSORS) / f64::from(processors.max(1));
    let build = work.build.mul_f64(speed * share);
    (build, work.rest.mul_f64(speed * share.max(1.0)))
}

/// Times a short piece of work. Returns the time of the fastest of three runs, because other work on this machine
/// may slow a run.
fn piece() -> Duration {
    let once = || {
        let since = Instant::now();
        let mut state = 1_u64;
        let mut words: Vec<u64> = Vec::new();
        for _ in 0..PIECE_SIZE {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            words.push(state);
        }
        words.sort_unstable();
        black_box(&words);
        since.elapsed()
    };
    (0..3).map(|_| once()).min().unwrap_or(PIECE)
}

const PIECE_SIZE: usize = 200_000;

/// Formats a time as `40 s` or `3 minutes`.
fn in_words(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..=90 => format!("{} s", seconds.max(5).next_multiple_of(5)),
        seconds => format!("{} minutes", seconds.div_ceil(60)),
    }
}

impl Workspace {
    /// Returns whether an earlier build left programs in the target folder.
    fn is_built(&self) -> bool {
        !self.built(false).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slower_machine_takes_longer_and_more_processors_build_sooner() {
        let work = Work {
            build: Duration::from_secs(200),
            rest: Duration::from_secs(100),
        };
        let seconds = |speed, processors| {
            let (build, rest) = stretched(work, speed, processors);
            (build.as_secs(), rest.as_secs())
        };
        assert_eq!(seconds(1.0, 2), (200, 100));
        assert_eq!(seconds(2.0, 2), (400, 200));
        assert_eq!(seconds(1.0, 8), (50, 100));
        assert_eq!(seconds(1.0, 1), (400, 200));
    }

    #[test]
    fn times_are_rounded_up() {
        let words = [1, 21, 90, 91, 121].map(|seconds| in_words(Duration::from_secs(seconds)));
        assert_eq!(words, ["5 s", "25 s", "90 s", "2 minutes", "3 minutes"]);
    }

    #[test]
    fn the_piece_takes_a_moment() {
        let took = piece();
        assert!(
            took > Duration::ZERO && took < Duration::from_secs(10),
            "{took:?}"
        );
    }
}
