//! Progress messages of long tests: `cargo lab test` ends a rig that prints nothing for two minutes.

use std::fmt;
use std::io::{Write, stderr};
use std::time::{Duration, Instant};

/// Interval between progress messages.
pub const EVERY: Duration = Duration::from_secs(20);

/// Time of the last progress message.
#[derive(Debug)]
pub struct Progress(Instant);

impl Progress {
    /// Begins the first interval.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Prints `how_far`, if the last message is at least [`EVERY`] ago.
    pub fn print(&mut self, how_far: fmt::Arguments<'_>) {
        if self.0.elapsed() >= EVERY {
            self.0 = Instant::now();
            print(how_far);
        }
    }
}

/// Prints `how_far` at once, directly to standard error, because the test's harness captures what `eprintln!`
/// prints until the test is over. A failed write is ignored.
pub fn print(how_far: fmt::Arguments<'_>) {
    drop(writeln!(stderr(), "{how_far}"));
}
