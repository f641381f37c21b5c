//! Turns off probes that have exceeded their budgets, and reports throttled hits.
//!
//! Invariant: every throttled hit is in exactly one notice. Every notice is logged and goes to all listeners of
//! the machine that want notices of its probe.

use std::time::Instant;

use hvprobe_engine::{ChangeError, StopError};
use tracing::warn;

use crate::events::notice::ThrottleNotice;
use crate::guest::Guest;
use crate::machine::Machine;

impl Machine {
    /// Turns off probes that have exceeded their budgets, and reports the hits that were throttled since the last
    /// call.
    pub(crate) fn report_throttled(&self) {
        let mut registry = self.registry();
        let (throttled, turned_off) = registry.throttle(&Guest(&self.shared));
        // Taken under the registry's lock, so that the windows of two calls do not overlap.
        let window = {
            let mut looked = self.throttle_looked();
            std::mem::replace(&mut *looked, Instant::now()).elapsed()
        };
        drop(registry);
        match turned_off {
            Ok(()) | Err(ChangeError::Stop(StopError::Ended)) => {}
            Err(error) => warn!(%error, "a probe that exceeded its budget stays on"),
        }
        let notice = |throttled| ThrottleNotice { throttled, window };
        let notices: Vec<ThrottleNotice> = throttled.into_iter().map(notice).collect();
        for ThrottleNotice { throttled, .. } in &notices {
            warn!(
                machine = self.config.name,
                probe = %throttled.probe,
                name = throttled.name,
                hits = throttled.count,
                ?window,
                disabled = throttled.disabled,
                "hits beyond the probe's budget were throttled"
            );
        }
        self.hub.notify(&notices);
    }
}
