//! Owners of a machine's probes, and of its pauses.
//!
//! ```text
//!   a pause, with or without an owner ────┐
//!                                         ├──► paused ──► resumed: everything above is over
//!   a hit of a probe that stops ──────────┘          └──► owners release theirs: resumed if nothing else is left
//! ```
//! Invariants: the machine is paused exactly while an entry here pauses it, so the entries and the pause change
//! under one lock. A pause by a probe's hit belongs to the probe's owner, also after the probe has been
//! unregistered. The lock is held only briefly, never while waiting. Lock order: the registry's, then this, then
//! that of `Control`. The cost of work for one owner is proportional to what this owner has, not to what all owners
//! have.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_spec::ProbeId;

/// Owner of probes and pauses of machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

/// Result of releasing owners' probes and pauses on one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LetGo {
    /// Number of probes that were unregistered, by owner.
    pub probes: BTreeMap<Owner, usize>,
    /// Whether the machine was paused before and has been resumed.
    pub resumed: bool,
}

/// Owners of a machine's probes and pauses.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// Owner of each probe that has one.
    probes: BTreeMap<ProbeId, Owner>,
    /// Probes of each owner. An owner without probes has no entry.
    owned: BTreeMap<Owner, BTreeSet<ProbeId>>,
    /// Pauses in force, by owner. `None` is a pause without an owner, which lasts until the machine is resumed.
    pauses: BTreeSet<Option<Owner>>,
    /// Hits that pause the machine, at most one of each vCPU. The latest is the last.
    hits: Vec<(ProbeId, usize)>,
}

impl Claims {
    /// Makes `owner` the owner of the probes `ids`.
    pub(crate) fn take(&mut self, ids: impl IntoIterator<Item = ProbeId>, owner: Owner) {
        for id in ids {
            if let Some(before) = self.probes.insert(id, owner) {
                self.disown(before, id);
            }
            self.owned.entry(owner).or_default().insert(id);
        }
    }

    /// Removes `id` from the probes of `owner`.
    fn disown(&mut self, owner: Owner, id: ProbeId) {
        if let Some(all) = self.owned.get_mut(&owner) {
            all.remove(&id);
            if all.is_empty() {
                self.owned.remove(&owner);
            }
        }
    }

    /// Returns the probes that have an owner, with their owners.
    pub(crate) fn probes(&self) -> &BTreeMap<ProbeId, Owner> {
        &self.probes
    }

    /// Returns the probes of `owners`, each with its owner.
    pub(crate) fn of(&self, owners: &[Owner]) -> Vec<(ProbeId, Owner)> {
        let owners: BTreeSet<Owner> = owners.iter().copied().collect();
        let theirs = owners.into_iter().flat_map(|owner| {
            let all = self.owned.get(&owner).into_iter().flatten();
            all.map(move |id| (*id, owner))
        });
        theirs.collect()
    }

    /// Returns whether `owner` has a probe or a pause.
    pub(crate) fn has(&self, owner: Owner) -> bool {
        self.pauses.contains(&Some(owner)) || self.owned.contains_key(&owner)
    }

    /// Forgets the unregistered probes `ids`. If a hit of a probe that has an owner pauses the machine, that pause
    /// becomes a pause of the owner.
    pub(crate) fn forget(&mut self, ids: &[ProbeId]) {
        for id in ids {
            let Some(owner) = self.probes.remove(id) else {
                continue;
            };
            self.disown(owner, *id);
            if self.hits.iter().any(|(probe, _)| probe == id) {
                self.hits.retain(|(probe, _)| probe != id);
                self.pauses.insert(Some(owner));
            }
        }
    }

    /// Adds a pause of `owner`. Returns `false` if there was one already.
    pub(crate) fn pause(&mut self, owner: Option<Owner>) -> bool {
        self.pauses.insert(owner)
    }

    /// Ends the pause of `owner`. Returns whether the machine can be resumed.
    pub(crate) fn unpause(&mut self, owner: Option<Owner>) -> bool {
        self.pauses.remove(&owner) && !self.is_paused()
    }

    /// Adds a pause by a hit of `probe` on `vcpu`.
    pub(crate) fn stop(&mut self, probe: ProbeId, vcpu: usize) {
        self.hits.push((probe, vcpu));
    }

    /// Ends all pauses.
    pub(crate) fn resume(&mut self) {
        self.pauses.clear();
        self.hits.clear();
    }

    /// Returns the latest hit that pauses the machine.
    pub(crate) fn stopped_at(&self) -> Option<(ProbeId, usize)> {
        self.hits.last().copied()
    }

    /// Returns the owners of the pauses in force, including pauses by hits of their probes.
    pub(crate) fn paused_by(&self) -> Vec<Owner> {
        let hits = self.hits.iter().filter_map(|(id, _)| self.probes.get(id));
        let pauses = self.pauses.iter().flatten();
        let all: BTreeSet<Owner> = hits.chain(pauses).copied().collect();
        all.into_iter().collect()
    }

    /// Removes all probes and pauses of `owners`. Returns whether the machine can be resumed because of that.
    pub(crate) fn release(&mut self, owners: &[Owner]) -> bool {
        let was_paused = self.is_paused();
        let all: BTreeSet<Owner> = owners.iter().copied().collect();
        let theirs = |owner: &Owner| all.contains(owner);
        let probes = &self.probes;
        self.hits
            .retain(|(id, _)| !probes.get(id).is_some_and(theirs));
        self.pauses
            .retain(|owner| !owner.as_ref().is_some_and(theirs));
        for owner in &all {
            for id in self.owned.remove(owner).into_iter().flatten() {
                self.probes.remove(&id);
            }
        }
        was_paused && !self.is_paused()
    }

    fn is_paused(&self) -> bool {
        !self.pauses.is_empty() || !self.hits.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: Owner = Owner(1);
    const B: Owner = Owner(2);

    #[test]
    fn who_paused_it_resumes_it_by_leaving_and_nobody_else_does() {
        let mut claims = Claims::default();
        claims.take([ProbeId(1)], A);
        claims.pause(Some(B));
        claims.stop(ProbeId(1), 0);
        assert_eq!(claims.paused_by(), [A, B]);
        assert!(!claims.release(&[A]), "it is paused for the other");
        assert_eq!(claims.stopped_at(), None);
        assert!(claims.release(&[B]));
        assert!(!claims.release(&[B]), "it runs");
    }

    #[test]
    fn what_nobody_owns_stays_paused() {
        let mut claims = Claims::default();
        claims.take([ProbeId(1)], A);
        claims.stop(ProbeId(7), 0);
        claims.stop(ProbeId(1), 1);
        assert!(!claims.release(&[A]));
        assert_eq!(claims.stopped_at(), Some((ProbeId(7), 0)));
        claims.resume();
        claims.pause(None);
        claims.pause(Some(A));
        assert!(!claims.release(&[A]));
        assert!(claims.unpause(None));
    }

    #[test]
    fn what_a_probe_paused_is_its_owners_when_it_has_left() {
        let mut claims = Claims::default();
        claims.take([ProbeId(1)], A);
        claims.stop(ProbeId(1), 0);
        claims.forget(&[ProbeId(1)]);
        assert_eq!((claims.stopped_at(), claims.has(A)), (None, true));
        assert!(claims.release(&[A]));
    }

    proptest! {
        /// Each claim is `(owner, probe)`; a probe pauses if its number is odd.
        #[test]
        fn whoever_leaves_last_leaves_nothing(
            claimed in prop::collection::vec((0..4_u64, 0..20_u32), 0..30),
            pauses in prop::collection::vec(0..4_u64, 0..4),
            order in Just([0, 1, 2, 3].map(Owner).to_vec()).prop_shuffle(),
        ) {
            let mut claims = Claims::default();
            for (owner, probe) in claimed {
                claims.take([ProbeId(probe)], Owner(owner));
            }
            let stopping: Vec<_> = claims.probes().keys().copied().filter(|id| id.0 % 2 == 1).collect();
            stopping.iter().for_each(|id| claims.stop(*id, 0));
            for owner in pauses {
                claims.pause(Some(Owner(owner)));
            }
            let mut was_paused = claims.is_paused();
            let mut resumed = 0;
            for owner in order {
                let goes_on = claims.release(&[owner]);
                prop_assert_eq!(goes_on, was_paused && !claims.is_paused());
                was_paused = claims.is_paused();
                resumed += u32::from(goes_on);
                prop_assert!(!claims.has(owner));
                let indexed: usize = claims.owned.values().map(BTreeSet::len).sum();
                prop_assert_eq!(indexed, claims.probes().len());
                prop_assert!(claims.of(&[owner]).is_empty());
            }
            prop_assert!(!claims.is_paused() && resumed <= 1);
        }
    }
}
