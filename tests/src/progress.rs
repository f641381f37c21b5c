//! What tests that take long say meanwhile: `cargo lab test` ends a rig that prints nothing for two minutes.

use std::fmt;
use std::io::{Write, stderr};
use std::time::{Duration, Instant};

/// How often they say that they go on.
pub const EVERY: Duration = Duration::from_secs(20);

/// When a test has said last that it goes on.
#[derive(Debug)]
pub struct Progress(Instant);

impl Progress {
    /// A test that begins.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Says `how_far` it is, if it did not within [`EVERY`].
    pub fn tell(&mut self, how_far: fmt::Arguments<'_>) {
        if self.0.elapsed() >= EVERY {
            self.0 = Instant::now();
            tell(how_far);
        }
    }
}

/// Says `how_far` a test is, at once: what `eprintln!` prints is kept by the test's harness until the test is
/// over. Where nobody hears it, the test goes on.
pub fn tell(how_far: fmt::Arguments<'_>) {
    drop(writeln!(stderr(), "{how_far}"));
}
