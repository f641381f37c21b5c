//! Reasons why a probe's specification is invalid.

use std::time::Duration;

use crate::limits::{CAPTURE_MAX, DEADLINE_MAX};

/// Reason why a specification is invalid. Errors about the place of the probe are not among these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The captured bytes exceed the limit of an event.
    #[error("captures {bytes} bytes; an event carries at most {CAPTURE_MAX}")]
    CaptureTooLong {
        /// Requested number of bytes.
        bytes: usize,
    },
    /// A list is too long.
    #[error("{count} {what}; at most {max} are possible")]
    TooMany {
        /// Kind of the elements.
        what: &'static str,
        /// Number of elements.
        count: usize,
        /// Maximum number of elements.
        max: usize,
    },
    /// A captured item has no bytes.
    #[error("item {index} of the capture is 0 bytes long")]
    EmptyItem {
        /// Position of the item, from 0.
        index: usize,
    },
    /// The request is valid for return probes only.
    #[error("{what} belongs to return probes: write `r SYMBOL` or `SYMBOL%return`")]
    ReturnOnly {
        /// What was requested.
        what: &'static str,
    },
    /// The request is invalid for return probes.
    #[error("a return probe has no {what}: use a probe at the function's entry")]
    NotForReturn {
        /// What was requested.
        what: &'static str,
    },
    /// The probe asks for a decision and also sets where the guest continues. Only the decision may set that.
    #[error("who asks for a decision cannot say where the guest goes on: put it into the default")]
    PathAndQuestion,
    /// The deadline is out of range.
    #[error("a deadline of {deadline:?}; between 1 ms and {DEADLINE_MAX:?} are possible")]
    Deadline {
        /// Requested deadline.
        deadline: Duration,
    },
    /// Both a number of instances and `auto` were requested.
    #[error("both {0} instances and automatic growth asked for: give one of them")]
    MaxactiveTwice(u32),
    /// The budget has no limit.
    #[error("a budget needs a limit: hits per second, or a share of the time")]
    NoLimit,
    /// The budget allows no hit.
    #[error("a budget of 0 hits per second: register the probe disabled instead")]
    NoRate,
    /// The share is not between 1 and 100 %.
    #[error("a budget of {0} % of the time; 1 to 100 % are possible")]
    Share(u8),
}
