//! Why a probe as it is asked for makes no sense.

use std::time::Duration;

use crate::limits::{CAPTURE_MAX, DEADLINE_MAX};

/// Why a specification makes no sense, apart from where the probe is to go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// More than an event can carry.
    #[error("captures {bytes} bytes; an event carries at most {CAPTURE_MAX}")]
    CaptureTooLong {
        /// How many were asked for.
        bytes: usize,
    },
    /// A list is too long.
    #[error("{count} {what}; at most {max} are possible")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many were given.
        count: usize,
        /// How many may be.
        max: usize,
    },
    /// An item of no bytes.
    #[error("item {index} of the capture is 0 bytes long")]
    EmptyItem {
        /// Its position, from 0.
        index: usize,
    },
    /// Only return probes do that.
    #[error("{what} belongs to return probes: write `r SYMBOL` or `SYMBOL%return`")]
    ReturnOnly {
        /// What was asked for.
        what: &'static str,
    },
    /// Return probes cannot do that.
    #[error("a return probe has no {what}: use a probe at the function's entry")]
    NotForReturn {
        /// What was asked for.
        what: &'static str,
    },
    /// The decision says where the guest goes on.
    #[error("who asks for a decision cannot say where the guest goes on: put it into the default")]
    PathAndQuestion,
    /// A deadline out of range.
    #[error("a deadline of {deadline:?}; between 1 ms and {DEADLINE_MAX:?} are possible")]
    Deadline {
        /// What was asked for.
        deadline: Duration,
    },
    /// Both a number of instances and `auto`.
    #[error("both {0} instances and automatic growth asked for: give one of them")]
    MaxactiveTwice(u32),
    /// A budget without a limit.
    #[error("a budget needs a limit: hits per second, or a share of the time")]
    NoLimit,
    /// No hit at all.
    #[error("a budget of 0 hits per second: register the probe disabled instead")]
    NoRate,
    /// Not a share.
    #[error("a budget of {0} % of the time; 1 to 100 % are possible")]
    Share(u8),
}
