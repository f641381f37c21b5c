//! Disables probes that have exceeded their budgets, and reports throttled hits.
//!
//! Invariant: every throttled hit is in exactly one notice.

use hvprobe_hit::Counters;
use hvprobe_spec::{ProbeId, ProbeSpec};

use crate::error::ChangeError;
use crate::info::Throttled;
use crate::registry::state::Registry;
use crate::sites::probes::Probes;
use crate::world::World;

/// Returns a notice of those throttled hits of `probe` that no notice has reported yet, if there are any, and
/// counts them as reported. `counters` are those of the probe.
fn take_notice(probe: ProbeId, spec: &ProbeSpec, counters: &Counters) -> Option<Throttled> {
    let meter = counters.meter()?;
    let count = meter.take_unreported(counters.sum().throttled);
    (count > 0).then(|| Throttled {
        probe,
        name: spec.definition.event_name(),
        count,
        disabled: meter.is_tripped(),
    })
}

impl Registry {
    /// Disables the probes that have exceeded their budgets. If there are any, this takes one stop of the virtual
    /// CPUs. Returns notices of the hits that were throttled since the last call. Meant to be called now and then.
    /// The notices are complete, even if the probes cannot be disabled.
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
        notices
            .extend(left.filter_map(|(id, probe)| take_notice(id, &probe.spec, &probe.counters)));
        (notices, turned_off)
    }
}

/// Refills the budgets of those of `ids` that were disabled for exceeding them.
pub(crate) fn refill(ids: &[ProbeId], probes: &Probes) {
    for probe in ids.iter().filter_map(|id| probes.get(*id)) {
        if let Some(meter) = probe.counters.meter() {
            meter.reset();
        }
    }
}

/// Removes probe `id` from `probes`, and adds its last notice to `notices`.
pub(crate) fn remove_probe(id: ProbeId, probes: &mut Probes, notices: &mut Vec<Throttled>) {
    if let Some(probe) = probes.remove(id) {
        let last = take_notice(id, &probe.spec, &probe.counters);
        notices.extend(last);
    }
}
