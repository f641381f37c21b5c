//! Record of the times that parts of a run took.

use std::time::Instant;

use crate::progress;

/// Times that the parts of a run took.
#[derive(Debug)]
pub(crate) struct Took {
    since: Instant,
    parts: Vec<String>,
}

impl Default for Took {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            parts: Vec::new(),
        }
    }
}

impl Took {
    /// Records the time since the last call, or since the start, as that of `what`.
    pub(crate) fn note(&mut self, what: &str) {
        let seconds = self.since.elapsed().as_secs();
        self.parts.push(format!("{what} took {seconds} s"));
        self.since = Instant::now();
    }

    /// Prints the times recorded so far.
    pub(crate) fn print(&self) {
        progress::note(&self.parts.join(", "));
    }
}
