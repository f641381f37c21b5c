//! Our code and data in the guest: those in use, and ghosts.
//!
//! The code and data of probes that have left (*ghosts*) stay unchanged, because a task may have been interrupted
//! there. They are released when a look through the guest's memory proves that no task can reach them.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Header;
use hvprobe_arch::insn::{Displaced, SlotCode, SlotKind};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::Followed;
use hvprobe_hit::record::{Reader, RecordSource, RecordSources};
use hvprobe_spec::ProbeId;
use tracing::warn;

use super::detours::Detours;
use super::ghosts::Ghosts;
use super::jump::Jump;
use super::keep::Keep;
use super::region::HiddenRegion;

/// Code of ours in the guest, and the sources of its records.
#[derive(Debug)]
pub(crate) struct OurCode {
    pub(crate) region: HiddenRegion,
    /// Boosted slots whose probes have left.
    pub(crate) ghost_slots: Ghosts,
    /// Retired jumps with their detours, by the addresses of their sites.
    pub(crate) ghost_jumps: BTreeMap<Gva, Vec<Jump>>,
    /// Sources that turn records of detours into events.
    pub(crate) sources: RecordSources,
    /// Sources of probes that have left; their ghosts may still write records.
    pub(crate) ghost_sources: Vec<Arc<RecordSource>>,
    /// Number to try first for the next source. If it is in use, the numbers after it are tried.
    pub(crate) next_number: u32,
    /// Whether every number has been given at least once.
    has_wrapped: bool,
    /// How much the ghosts must grow after a look before another look is worth its cost.
    pub(crate) keep: Keep,
    /// Amount of ghosts at the last look.
    pub(crate) kept: Keep,
}

impl OurCode {
    pub(crate) fn new(region: HiddenRegion) -> Self {
        Self {
            region,
            ghost_slots: Ghosts::default(),
            ghost_jumps: BTreeMap::new(),
            sources: RecordSources::default(),
            ghost_sources: Vec::new(),
            next_number: 0,
            has_wrapped: false,
            keep: Keep::default(),
            kept: Keep::NOTHING,
        }
    }

    /// Returns whether there is memory for detours.
    pub(crate) fn has_detours(&self) -> bool {
        self.region.detours.is_some()
    }

    /// Returns a reader of the ring that detours record into; `None` where no detour can be made.
    pub(crate) fn reader(&self) -> Option<Reader> {
        Some(Reader::new(self.region.ring()?, self.sources.clone()))
    }

    /// Returns the number of a new source of records. A released number is returned again only after all others; by
    /// then, no record with it is left in the ring.
    pub(crate) fn source_number(&mut self) -> u32 {
        // The guest has room for far fewer sources than there are numbers, so the loop ends.
        loop {
            let number = self.next_number;
            self.next_number = (number + 1) % Header::SOURCES;
            self.has_wrapped |= self.next_number == 0;
            let mut ghosts = self.ghost_sources.iter();
            let is_free = || !self.sources.has_number(number);
            // In the first round every number is given for the first time.
            if !self.has_wrapped || is_free() && ghosts.all(|ghost| ghost.number() != number) {
                return number;
            }
        }
    }

    /// Retires the slot of a site: makes it a ghost if it is boosted, and releases it otherwise. No task is in a
    /// stepped slot while the virtual CPUs are stopped.
    pub(crate) fn retire_slot(
        &mut self,
        displaced: Displaced,
        slot: Option<SlotCode>,
        mem: &dyn PhysMemory,
    ) {
        match slot {
            Some(slot) if slot.kind() == SlotKind::Boosted => {
                self.ghost_slots.insert(displaced, slot);
            }
            Some(slot) => self.release_slot(&slot, mem),
            None => {}
        }
    }

    /// Reclaims `slot`, if it was a ghost, because a site uses it now.
    pub(crate) fn reclaim_slot(&mut self, slot: &SlotCode) {
        self.ghost_slots.remove(slot);
    }

    /// Releases `slot`, in which no task can be.
    pub(crate) fn release_slot(&mut self, slot: &SlotCode, mem: &dyn PhysMemory) {
        if let Err(error) = self.region.release(mem, slot.at()) {
            warn!(%error, "an out-of-line slot could not be released");
        }
    }

    /// Retires the jump of the site at `at`. A task may be in its detour.
    pub(crate) fn retire_jump(&mut self, at: Gva, jump: Jump) {
        self.ghost_jumps.entry(at).or_default().push(jump);
    }

    /// Retires jumps that were prepared and not used. The same members at the same sites may reclaim them.
    pub(crate) fn retire_jumps(&mut self, prepared: impl IntoIterator<Item = (Gva, Jump)>) {
        for (at, jump) in prepared {
            self.retire_jump(at, jump);
        }
    }

    /// Reclaims a retired jump of the site at `at` whose detour records for `members`.
    pub(crate) fn reclaim_jump(&mut self, at: Gva, members: &[ProbeId]) -> Option<Jump> {
        let ghosts = self.ghost_jumps.get_mut(&at)?;
        ghosts.extract_if(.., |jump| jump.members == members).next()
    }

    /// Retires the sources of the probes `ids`. Their records must have been taken out of the ring.
    pub(crate) fn retire_sources(&mut self, ids: impl IntoIterator<Item = ProbeId>) {
        let sources = ids.into_iter().filter_map(|id| self.sources.remove(id));
        self.ghost_sources.extend(sources);
    }

    /// Releases the source of probe `id`, which was never planted.
    pub(crate) fn release_source(&mut self, id: ProbeId, mem: &dyn PhysMemory) {
        if let Some(source) = self.sources.remove(id)
            && let Some(detours) = &mut self.region.detours
        {
            release_data(detours, &source, mem);
        }
    }

    /// Returns the amount of memory kept for probes that have left.
    pub(crate) fn left_behind(&self) -> Keep {
        let jumps = self.ghost_jumps.values().flatten();
        let mut left = Keep {
            code: jumps.map(Jump::size).sum(),
            instances: 0,
            sources: self.ghost_sources.len(),
        };
        let followed = self.ghost_sources.iter();
        for calls in followed.filter_map(|source| source.followed()) {
            left.code += calls.code_len;
            left.instances += calls.size();
        }
        left
    }

    /// Returns whether the ghosts have grown by one of the limits since the last look.
    pub(crate) fn is_crowded(&self) -> bool {
        let (left, kept, keep) = (self.left_behind(), &self.kept, &self.keep);
        left.code >= kept.code + keep.code
            || left.instances >= kept.instances + keep.instances
            || left.sources >= kept.sources + keep.sources
    }

    /// Forgets all ghosts of code: another kernel runs, so no task reaches them. Sources stay, because their
    /// records are still to be passed on.
    pub(crate) fn forget_ghosts(&mut self) {
        self.ghost_slots = Ghosts::default();
        self.ghost_jumps.clear();
        self.kept = Keep::NOTHING;
    }
}

/// Releases the counters of `source`, and the memory of its calls.
pub(crate) fn release_data(detours: &mut Detours, source: &RecordSource, mem: &dyn PhysMemory) {
    detours.release_counters(source.words);
    if let Some(calls) = source.followed() {
        release_calls(detours, calls, mem);
    }
}

/// Releases the stubs and instances of `calls`.
pub(crate) fn release_calls(detours: &mut Detours, calls: &Followed, mem: &dyn PhysMemory) {
    detours.release(mem, calls.stubs, calls.code_len);
    detours.release_instances(calls.instances.at, calls.size());
}
