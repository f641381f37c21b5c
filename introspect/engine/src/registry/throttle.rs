//! Turning probes off that have exceeded their budgets, and telling which hits were throttled.
//!
//! Invariant: every throttled hit is told in exactly one notice.

use hvprobe_hit::Counters;
use hvprobe_spec::{ProbeId, ProbeSpec};

use crate::error::ChangeError;
use crate::info::Throttled;
use crate::registry::state::Registry;
use crate::world::World;

/// What has not been told of `counters`, which are `probe`'s.
fn untold(probe: ProbeId, spec: &ProbeSpec, counters: &Counters) -> Option<Throttled> {
    let meter = counters.meter()?;
    let count = meter.untold(counters.sum().throttled);
    (count > 0).then(|| Throttled {
        probe,
        name: spec.definition.event_name(),
        count,
        disabled: meter.is_tripped(),
    })
}

impl Registry {
    /// Turns off the probes that have exceeded their budget, in one stop of the virtual CPUs if
    /// there are any, and tells which hits were throttled since the last look. Meant to be called
    /// now and then. Whatever happens to the probes, the notices are complete.
    pub fn throttle(&mut self, world: &dyn World) -> (Vec<Throttled>, Result<(), ChangeError>) {
        let exceeded: Vec<ProbeId> = self
            .probes
            .iter()
            .filter(|(_, probe)| !probe.spec.disabled && probe.counters.is_tripped())
            .map(|(id, _)| id)
            .collect();
        let turned_off = if exceeded.is_empty() {
            Ok(())
        } else {
            self.set_enabled(&exceeded, false, world)
        };
        let mut notices = std::mem::take(&mut self.last_throttled);
        let left = self.probes.iter();
        notices.extend(left.filter_map(|(id, probe)| untold(id, &probe.spec, &probe.counters)));
        (notices, turned_off)
    }

    /// Gives those of `ids` that were turned off their budgets back.
    pub(crate) fn refill(&self, ids: &[ProbeId]) {
        for probe in ids.iter().filter_map(|id| self.probes.get(*id)) {
            if let Some(meter) = probe.counters.meter() {
                meter.reset();
            }
        }
    }

    /// Forgets probe `id`, but for the notice that it leaves.
    pub(crate) fn forget_probe(&mut self, id: ProbeId) {
        if let Some(probe) = self.probes.remove(id) {
            let last = untold(id, &probe.spec, &probe.counters);
            self.last_throttled.extend(last);
        }
    }
}
