//! The list of probes, and the check for text that the guest has rewritten.

use std::sync::Arc;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_spec::ProbeId;
use tracing::warn;

use crate::info::{ProbeInfo, ProbeState};
use crate::registry::slots::mechanism;
use crate::registry::state::Registry;
use crate::sites::site::{Placement, Probe, SiteState};
use crate::sites::text::{Text, is_rewritten};
use crate::world::World;

impl Registry {
    /// Returns every registered probe, in the order of registration.
    #[must_use]
    pub fn list(&self, mem: &dyn PhysMemory) -> Vec<ProbeInfo> {
        self.probes
            .iter()
            .map(|(id, probe)| self.info(id, probe, mem))
            .collect()
    }

    fn info(&self, id: ProbeId, probe: &Probe, mem: &dyn PhysMemory) -> ProbeInfo {
        let site = match probe.placement {
            Placement::At(at) => self.sites.get(&at),
            _ => None,
        };
        let rewritten = site.is_some_and(|site| self.is_rewritten(site, mem));
        ProbeInfo {
            id,
            name: probe.spec.definition.event_name(),
            definition: probe.spec.definition.to_string(),
            kind: probe.spec.definition.kind,
            addr: site.map(|site| site.point.displaced.at()),
            symbol: site.map(|site| site.point.symbol.clone()),
            state: match &probe.placement {
                Placement::Pending => ProbeState::Pending,
                Placement::Refused(why) => ProbeState::Refused(why.to_string()),
                Placement::Gone => ProbeState::Gone,
                Placement::At(_) if rewritten => ProbeState::Gone,
                Placement::At(_) => ProbeState::Placed,
            },
            disabled: probe.spec.disabled,
            turned_off: probe.counters.is_tripped(),
            budget: probe.spec.budget,
            mechanism: site.map(|site| mechanism(site, &self.rules())),
            unoptimized: site.and_then(|site| self.rules().unoptimized(site)),
            maxactive: probe.pool.as_ref().map(|pool| pool.limit()),
            counts: probe.counters.sum(),
            actions: Arc::clone(&probe.actions),
            shown: Arc::clone(&probe.shown),
            awaited: probe.awaited.clone(),
        }
    }

    /// Returns whether the guest has replaced the text at `site`.
    pub(crate) fn is_rewritten(&self, site: &SiteState, mem: &dyn PhysMemory) -> bool {
        let Some(live) = &self.live else { return false };
        let tables = &live.view.tables;
        is_rewritten(site, &self.sites, &Text { tables, mem })
    }

    /// Checks whether the guest has rewritten text under probes. Marks and logs such sites. Meant to be called now
    /// and then. Needs a stop only if all our patches are gone, to find out whether another kernel runs.
    pub fn check_text(&mut self, world: &dyn World) {
        let mem = world.memory();
        let rewritten: Vec<_> = self
            .sites
            .iter()
            .filter(|(_, site)| {
                let left_to_ftrace = site.point.ftrace && !site.is_armed();
                !site.gone && !left_to_ftrace && self.is_rewritten(site, mem)
            })
            .map(|(at, _)| *at)
            .collect();
        let is_all = !rewritten.is_empty() && !self.holds_any(mem);
        if (is_all || self.is_overwritten(mem)) && self.find_out_replaced(world) {
            return;
        }
        for at in rewritten {
            if let Some(site) = self.sites.get_mut(&at) {
                site.gone = true;
                let (name, offset) = &site.point.symbol;
                warn!(%at, symbol = name, offset, "the guest rewrote the text under a probe");
            }
        }
    }
}
