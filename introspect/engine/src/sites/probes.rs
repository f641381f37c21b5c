//! The registered probes of a machine.
//!
//! ```text
//!   registered ──────► leaving ──────► removed
//!       ▲                 │
//!       └── stays ────────┘  its unregistration failed
//! ```
//! Invariant: an id is never given twice. A leaving probe is still stored, with its counters, but no site is to
//! serve it any more.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_spec::ProbeId;

use super::site::{Placement, Probe};

/// All probes, in the order of their registration.
#[derive(Debug)]
pub(crate) struct Probes {
    by_id: BTreeMap<ProbeId, Probe>,
    leaving: BTreeSet<ProbeId>,
    /// Ids of the return probes.
    following: BTreeSet<ProbeId>,
    next: u32,
}

impl Default for Probes {
    fn default() -> Self {
        Self {
            by_id: BTreeMap::new(),
            leaving: BTreeSet::new(),
            following: BTreeSet::new(),
            next: 1,
        }
    }
}

impl Probes {
    /// Returns the id that the next probe gets.
    pub(crate) fn next_id(&self) -> ProbeId {
        ProbeId(self.next)
    }

    /// Adds a probe, which gets the id [`Self::next_id`].
    pub(crate) fn add(&mut self, probe: Probe) -> ProbeId {
        let id = self.next_id();
        if probe.spec.is_return() {
            self.following.insert(id);
        }
        self.by_id.insert(id, probe);
        self.next = self.next.saturating_add(1);
        id
    }

    pub(crate) fn remove(&mut self, id: ProbeId) -> Option<Probe> {
        self.leaving.remove(&id);
        self.following.remove(&id);
        self.by_id.remove(&id)
    }

    pub(crate) fn get(&self, id: ProbeId) -> Option<&Probe> {
        self.by_id.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: ProbeId) -> Option<&mut Probe> {
        self.by_id.get_mut(&id)
    }

    pub(crate) fn contains(&self, id: ProbeId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn ids(&self) -> Vec<ProbeId> {
        self.by_id.keys().copied().collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ProbeId, &Probe)> {
        self.by_id.iter().map(|(id, probe)| (*id, probe))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (ProbeId, &mut Probe)> {
        self.by_id.iter_mut().map(|(id, probe)| (*id, probe))
    }

    /// Marks `ids` as leaving.
    pub(crate) fn leave(&mut self, ids: impl IntoIterator<Item = ProbeId>) {
        self.leaving.extend(ids);
    }

    /// Marks all leaving probes as staying.
    pub(crate) fn stay(&mut self) {
        self.leaving.clear();
    }

    /// Returns whether `id` is leaving.
    pub(crate) fn is_leaving(&self, id: ProbeId) -> bool {
        self.leaving.contains(&id)
    }

    /// Returns probe `id`, unless it is leaving.
    pub(crate) fn get_staying(&self, id: ProbeId) -> Option<&Probe> {
        self.get(id).filter(|_| !self.is_leaving(id))
    }

    /// Returns the probes that are not leaving.
    pub(crate) fn staying(&self) -> impl Iterator<Item = (ProbeId, &Probe)> {
        self.iter().filter(|(id, _)| !self.is_leaving(*id))
    }

    /// Returns whether probe `id` is enabled and not leaving.
    pub(crate) fn is_enabled(&self, id: ProbeId) -> bool {
        let probe = self.get_staying(id);
        probe.is_some_and(|probe| !probe.spec.disabled)
    }

    /// Returns whether one of `ids` is enabled.
    pub(crate) fn any_enabled(&self, ids: &[ProbeId]) -> bool {
        ids.iter().any(|id| self.is_enabled(*id))
    }

    /// Returns those of `ids` that are enabled, with their probes.
    pub(crate) fn enabled<'s>(
        &'s self,
        ids: &'s [ProbeId],
    ) -> impl Iterator<Item = (ProbeId, &'s Probe)> {
        let ids = ids.iter().copied();
        ids.filter(|id| self.is_enabled(*id))
            .filter_map(|id| Some((id, self.get(id)?)))
    }

    /// Returns whether any return probe has a probepoint and is not leaving.
    pub(crate) fn has_return_probes(&self) -> bool {
        self.staying()
            .any(|(_, probe)| probe.pool.is_some() && matches!(probe.placement, Placement::At(_)))
    }

    /// Returns whether any return probe is not leaving.
    pub(crate) fn follow_calls(&self) -> bool {
        self.following.iter().any(|id| !self.is_leaving(*id))
    }

    /// Returns whether one of `ids` is a return probe that is not leaving.
    pub(crate) fn any_follows_calls(&self, ids: &[ProbeId]) -> bool {
        let mut staying = ids.iter().filter_map(|id| self.get_staying(*id));
        staying.any(|probe| probe.pool.is_some())
    }

    /// Returns the probes that are leaving.
    pub(crate) fn leaving(&self) -> impl Iterator<Item = (ProbeId, &Probe)> {
        self.iter().filter(|(id, _)| self.is_leaving(*id))
    }
}
