//! Boosted slots whose probes have left, but in which a task may have been interrupted.
//!
//! Invariant: a slot is here at most once. Lookups by instruction and by address are both fast, because one batch
//! may add or reclaim thousands of ghosts.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Displaced, SlotCode};

/// All ghosts of a machine's slots.
#[derive(Debug, Default)]
pub(crate) struct Ghosts {
    /// Ghosts by the address of the slot.
    by_slot: BTreeMap<Gva, (Displaced, SlotCode)>,
    /// Addresses of slots, by the address of the displaced instruction. There are several if modules were loaded at
    /// this address one after another.
    by_address: BTreeMap<Gva, Vec<Gva>>,
}

impl Ghosts {
    pub(crate) fn len(&self) -> usize {
        self.by_slot.len()
    }

    pub(crate) fn insert(&mut self, displaced: Displaced, code: SlotCode) {
        if self.by_slot.insert(code.at(), (displaced, code)).is_none() {
            let slots = self.by_address.entry(displaced.at()).or_default();
            slots.push(code.at());
        }
    }

    /// Returns the ghost slot that holds exactly the instruction `displaced`.
    pub(crate) fn of(&self, displaced: &Displaced) -> Option<SlotCode> {
        let slots = self.by_address.get(&displaced.at())?;
        let mut ghosts = slots.iter().filter_map(|slot| self.by_slot.get(slot));
        let (_, code) = ghosts.find(|(ghost, _)| ghost == displaced)?;
        Some(*code)
    }

    pub(crate) fn contains(&self, code: &SlotCode) -> bool {
        let found = self.by_slot.get(&code.at());
        found.is_some_and(|(_, ghost)| ghost == code)
    }

    pub(crate) fn remove(&mut self, code: &SlotCode) {
        if self.contains(code)
            && let Some((displaced, _)) = self.by_slot.remove(&code.at())
            && let Some(slots) = self.by_address.get_mut(&displaced.at())
        {
            slots.retain(|slot| *slot != code.at());
            if slots.is_empty() {
                self.by_address.remove(&displaced.at());
            }
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(Displaced, SlotCode)> {
        self.by_slot.values()
    }

    pub(crate) fn codes(&self) -> impl Iterator<Item = &SlotCode> {
        self.by_slot.values().map(|(_, code)| code)
    }
}
