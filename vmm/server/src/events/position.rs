//! Where a stream of a machine's events is, and what is missing in it.

use hvprobe_machine::queue::Loss;
use hvprobe_proto::v1;

/// Everything before it has been sent, counted as lost, or is not wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    /// The number of the next event.
    pub(crate) seq: u64,
    /// How many were dropped before they got a number.
    pub(crate) dropped: u64,
}

impl Position {
    /// What is behind both.
    pub(crate) fn join(self, other: Self) -> Self {
        Self {
            seq: self.seq.max(other.seq),
            dropped: self.dropped.max(other.dropped),
        }
    }

    /// Whether nothing of it is beyond `end`.
    pub(crate) fn is_within(self, end: Self) -> bool {
        self.join(end) == end
    }

    /// As clients are told.
    pub(crate) fn told(self, machine_uid: &str) -> v1::Position {
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
    /// They are all before it.
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
