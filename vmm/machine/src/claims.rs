//! What of a machine belongs to whom: its probes, and what keeps it paused.
//!
//! ```text
//!   a pause, for somebody or for nobody ──┐
//!                                         ├──► paused ──► resumed: everything above is over
//!   a hit of a probe that stops ──────────┘          └──► let go, by whose it is: resumed if nothing else is left
//! ```
//! Invariants: the machine is paused exactly while something here pauses it, so both change under one
//! lock; what a probe has paused is its owner's, also when the probe has been taken out since. The lock is
//! held for moments only, never while waiting; it comes after that of the registry, and before that of
//! `Control`. What is asked of an owner costs what that one has, not what all have.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_spec::ProbeId;

/// Somebody whom probes and pauses of machines can belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

/// What was let go of one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LetGo {
    /// How many probes were taken out, of whom.
    pub probes: BTreeMap<Owner, usize>,
    /// The machine goes on, which had been paused.
    pub resumed: bool,
}

/// Who has what of a machine.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// The probes that belong to somebody.
    probes: BTreeMap<ProbeId, Owner>,
    /// The same by whose they are; who has none is not in it.
    owned: BTreeMap<Owner, BTreeSet<ProbeId>>,
    /// For whom the machine is paused; `None` for nobody in particular, until it is resumed.
    pauses: BTreeSet<Option<Owner>>,
    /// The hits that pause it, of each virtual CPU one at most; the last one comes last.
    hits: Vec<(ProbeId, usize)>,
}

impl Claims {
    /// `ids` are probes of `owner` from now on.
    pub(crate) fn take(&mut self, ids: impl IntoIterator<Item = ProbeId>, owner: Owner) {
        for id in ids {
            if let Some(before) = self.probes.insert(id, owner) {
                self.disown(before, id);
            }
            self.owned.entry(owner).or_default().insert(id);
        }
    }

    /// `id` is not of `owner` any more.
    fn disown(&mut self, owner: Owner, id: ProbeId) {
        if let Some(all) = self.owned.get_mut(&owner) {
            all.remove(&id);
            if all.is_empty() {
                self.owned.remove(&owner);
            }
        }
    }

    /// The probes that belong to somebody, and to whom.
    pub(crate) fn probes(&self) -> &BTreeMap<ProbeId, Owner> {
        &self.probes
    }

    /// The probes of `owners`, and whose each is.
    pub(crate) fn of(&self, owners: &[Owner]) -> Vec<(ProbeId, Owner)> {
        let owners: BTreeSet<Owner> = owners.iter().copied().collect();
        let theirs = owners.into_iter().flat_map(|owner| {
            let all = self.owned.get(&owner).into_iter().flatten();
            all.map(move |id| (*id, owner))
        });
        theirs.collect()
    }

    /// Whether `owner` has anything.
    pub(crate) fn has(&self, owner: Owner) -> bool {
        self.pauses.contains(&Some(owner)) || self.owned.contains_key(&owner)
    }

    /// The probes `ids` have left. What they have paused stays so, for their owner.
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

    /// The machine is paused for `owner`; whether it was not before.
    pub(crate) fn pause(&mut self, owner: Option<Owner>) -> bool {
        self.pauses.insert(owner)
    }

    /// It is not paused for `owner` any more; whether it goes on.
    pub(crate) fn unpause(&mut self, owner: Option<Owner>) -> bool {
        self.pauses.remove(&owner) && !self.is_paused()
    }

    /// A hit of `probe` on `vcpu` pauses it.
    pub(crate) fn stop(&mut self, probe: ProbeId, vcpu: usize) {
        self.hits.push((probe, vcpu));
    }

    /// Nothing pauses it any more.
    pub(crate) fn resume(&mut self) {
        self.pauses.clear();
        self.hits.clear();
    }

    /// The hit that paused it last.
    pub(crate) fn stopped_at(&self) -> Option<(ProbeId, usize)> {
        self.hits.last().copied()
    }

    /// For whom it is paused, if for anybody in particular.
    pub(crate) fn paused_by(&self) -> Vec<Owner> {
        let hits = self.hits.iter().filter_map(|(id, _)| self.probes.get(id));
        let pauses = self.pauses.iter().flatten();
        let all: BTreeSet<Owner> = hits.chain(pauses).copied().collect();
        all.into_iter().collect()
    }

    /// Nothing is of `owners` any more; whether the machine goes on for that.
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
        /// Each claim is `(owner, probe)`; a probe stops if its number is odd.
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
