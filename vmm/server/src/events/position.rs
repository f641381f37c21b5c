//! Positions in a stream of a machine's events, and losses.

use hvprobe_machine::queue::Loss;
use hvprobe_proto::v1;

/// A position in a stream: every event before it has been sent, is counted as lost, or is not wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    /// Number of the next event.
    pub(crate) seq: u64,
    /// Number of events that were dropped before they got a number.
    pub(crate) dropped: u64,
}

impl Position {
    /// Returns the position with the greater `seq` and the greater `dropped` of both.
    pub(crate) fn join(self, other: Self) -> Self {
        Self {
            seq: self.seq.max(other.seq),
            dropped: self.dropped.max(other.dropped),
        }
    }

    /// Whether neither number is beyond that of `end`.
    pub(crate) fn is_within(self, end: Self) -> bool {
        self.join(end) == end
    }

    /// Converts the position for clients.
    pub(crate) fn to_proto(self, machine_uid: &str) -> v1::Position {
        v1::Position {
            machine_uid: machine_uid.to_owned(),
            seq: self.seq,
            dropped: self.dropped,
        }
    }
}

impl From<&v1::Position> for Position {
    fn from(position: &v1::Position) -> Self {
        Self {
            seq: position.seq,
            dropped: position.dropped,
        }
    }
}

/// Events that one client lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) count: u64,
    /// Position after the lost events.
    pub(crate) until: Position,
}

impl Loss for Lost {
    fn is_nothing(&self) -> bool {
        self.count == 0
    }

    fn add(&mut self, later: Self) {
        self.count = self.count.saturating_add(later.count);
        self.until = self.until.join(later.until);
    }
}
