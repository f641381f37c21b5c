//! Creates probes and assigns them to sites before planting, and undoes the assignment if planting fails.
//!
//! Invariant: a site's members are the probes whose placement names the site. The only exceptions are leaving
//! probes, which a change detaches from the site before they are removed.

use std::sync::Arc;

use hvprobe_hit::calls::{Calls, MaxActive};
use hvprobe_hit::{Counters, entry_data_size};
use hvprobe_spec::definition::Kind;
use hvprobe_spec::{ProbeId, ProbeSpec};

use crate::info::Awaited;
use crate::plan::arguments::{Resolved, resolve};
use crate::plan::kernel::Probeable;
use crate::plan::probepoint::Probepoint;
use crate::refusal::Refused;
use crate::sites::probes::Probes;
use crate::sites::site::{Patch, Placement, Probe, SiteState, Sites};

/// Creates probe `id`. `vcpus` is the number of the machine's virtual CPUs. If the probe is a return probe,
/// allocates its instances in `calls`.
pub(crate) fn create(
    id: ProbeId,
    spec: &ProbeSpec,
    resolved: Resolved,
    calls: &Calls,
    vcpus: usize,
) -> Result<Probe, Refused> {
    let pool = match spec.definition.kind {
        Kind::Probe => None,
        Kind::Return { maxactive } => {
            let maxactive = match maxactive {
                _ if spec.maxactive_auto => MaxActive::Auto,
                Some(number) => MaxActive::Fixed(number),
                None => MaxActive::Default,
            };
            let data = entry_data_size(&resolved.actions);
            Some(Arc::new(calls.pool(id, maxactive, data)?))
        }
    };
    Ok(Probe {
        spec: spec.clone(),
        counters: Arc::new(Counters::with_budget(vcpus, spec.budget.as_ref())),
        actions: Arc::new(resolved.actions),
        shown: Arc::new(resolved.shown),
        awaited: resolved.awaited.then(Awaited::default),
        pool,
        placement: Placement::Pending,
    })
}

/// Resolves the captured items and shown values of probe `id`, if they had to wait for its module, which is loaded
/// now. `point` is its probepoint. The probe has never recorded anything. The other parameters are those of
/// [`create`].
pub(crate) fn resolve_awaited(
    id: ProbeId,
    point: &Probepoint,
    probes: &mut Probes,
    kernel: &Probeable<'_>,
    calls: &Calls,
    vcpus: usize,
) -> Result<(), Refused> {
    let Some(probe) = probes.get_mut(id) else {
        return Ok(());
    };
    let Some(awaited) = probe.awaited.clone() else {
        return Ok(());
    };
    // Release the pool first, because the new pool may need its room. The new size is known only now.
    probe.pool = None;
    let resolved = resolve(&probe.spec, Some(point), kernel)?;
    let fresh = create(id, &probe.spec, resolved, calls, vcpus)?;
    awaited.resolve(&fresh.actions, &fresh.shown);
    *probe = Probe {
        counters: Arc::clone(&probe.counters),
        ..fresh
    };
    Ok(())
}

/// Places probe `id` at the site of `point`.
pub(crate) fn place(id: ProbeId, point: Probepoint, probes: &mut Probes, sites: &mut Sites) {
    let at = point.displaced.at();
    let members = &mut site_of(point, sites).members;
    // A probe that was pending may be older than those at the site.
    let behind = members.partition_point(|member| *member < id);
    members.insert(behind, id);
    if let Some(probe) = probes.get_mut(id) {
        probe.placement = Placement::At(at);
    }
}

/// Returns the site at `point`, and creates it if there is none.
pub(crate) fn site_of(point: Probepoint, sites: &mut Sites) -> &mut SiteState {
    sites
        .entry(point.displaced.at())
        .or_insert_with(|| SiteState {
            point,
            occupied: false,
            slot: None,
            members: Vec::new(),
            internal: None,
            patch: Patch::None,
            unprepared: None,
            gone: false,
        })
}

/// Detaches probe `id` from its site: reverts a [`place`] that was not committed.
pub(crate) fn detach(id: ProbeId, probes: &mut Probes, sites: &mut Sites) {
    let Some(probe) = probes.get_mut(id) else {
        return;
    };
    let Placement::At(at) = probe.placement else {
        return;
    };
    if let Some(site) = sites.get_mut(&at) {
        site.members.retain(|member| *member != id);
        // A site that was never committed has no slot.
        if site.members.is_empty() && site.internal.is_none() && !site.is_armed() {
            sites.remove(&at);
        }
    }
    probe.placement = Placement::Pending;
}
