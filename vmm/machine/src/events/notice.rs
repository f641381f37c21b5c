//! Notices that listeners get besides events.

use std::time::Duration;

use hvprobe_engine::Throttled;

/// Notice of throttled hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThrottleNotice {
    /// The probe, and the number of its throttled hits.
    pub throttled: Throttled,
    /// Length of the period in which the hits were throttled. The period ends with the notice.
    pub window: Duration,
}
