//! What listeners are told beside events.

use std::time::Duration;

use hvprobe_engine::Throttled;

/// Hits that were throttled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThrottleNotice {
    /// Of which probe, and how many.
    pub throttled: Throttled,
    /// Within which time before the notice.
    pub window: Duration,
}
