//! Placeholder for the questions that hits put to clients.

use hvprobe_introspect::event::Event;
use hvprobe_introspect::probe::ProbeId;
use hvprobe_introspect::probe::spec::Decision;

/// A virtual CPU waits at a hit.
#[derive(Clone, Debug)]
pub struct Question {
    /// Names it.
    pub token: u64,
    /// The hit.
    pub event: Event,
    /// When it falls to the default, nanoseconds of `CLOCK_MONOTONIC`.
    pub deadline_ns: u64,
}

/// The questions of a machine.
#[derive(Debug, Default)]
pub struct Decisions(());

impl Decisions {
    /// Decides for `probes` from now on.
    #[must_use]
    pub fn attach(&self, _probes: Vec<ProbeId>) -> Asker {
        Asker(())
    }
}

/// Whoever decides. Dropped, its open questions fall to the default.
#[derive(Debug)]
pub struct Asker(());

impl Asker {
    /// The next question; `None` when the machine has ended. Cancel safe.
    pub async fn next(&mut self) -> Option<Question> {
        std::future::pending().await
    }

    /// Answers; `false` when it is too late.
    #[must_use]
    pub fn answer(&self, _token: u64, _decision: Decision) -> bool {
        false
    }
}
