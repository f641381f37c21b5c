//! Everything of ours that lies in the guest, in use or left behind.
//!
//! What probes leave behind (*ghosts*) stays as it is, because somebody may have been interrupted
//! there, until a look through the guest's memory says otherwise.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Header;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::Followed;
use hvprobe_hit::record::{Reader, RecordSource, RecordSources};
use hvprobe_spec::ProbeId;

use super::detours::Detours;
use super::ghosts::Ghosts;
use super::jump::Jump;
use super::keep::Keep;
use super::region::HiddenRegion;

/// Code of ours in the guest, and what it records with.
#[derive(Debug)]
pub(crate) struct OurCode {
    pub(crate) region: HiddenRegion,
    /// Boosted slots whose probe has left.
    pub(crate) ghost_slots: Ghosts,
    /// Jumps that were in use, with their detours, by their sites.
    pub(crate) ghost_jumps: BTreeMap<Gva, Vec<Jump>>,
    /// What turns records of detours into events.
    pub(crate) sources: RecordSources,
    /// What probes that have left recorded with, and their ghosts still may.
    pub(crate) ghost_sources: Vec<Arc<RecordSource>>,
    /// The number that the next one's records get, if it is free.
    pub(crate) next_number: u32,
    /// Whether all numbers have been given once.
    has_wrapped: bool,
    /// How much of that may come together.
    pub(crate) keep: Keep,
    /// How much had when it was last looked who may still come there.
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

    /// Reads the ring that detours record into; `None` where no detour can be made.
    pub(crate) fn reader(&self) -> Option<Reader> {
        Some(Reader::new(self.region.ring()?, self.sources.clone()))
    }

    /// A number for a source of records. One that has been given back comes again after all others, when nothing with it
    /// is in the ring any more.
    pub(crate) fn source_number(&mut self) -> u32 {
        // Much fewer sources fit into the guest than there are numbers.
        loop {
            let number = self.next_number;
            self.next_number = (number + 1) % Header::SOURCES;
            self.has_wrapped |= self.next_number == 0;
            let mut ghosts = self.ghost_sources.iter();
            let is_free = || !self.sources.has_number(number);
            // The first time none was given before.
            if !self.has_wrapped || is_free() && ghosts.all(|ghost| ghost.number() != number) {
                return number;
            }
        }
    }

    /// A site has no use for its jump any more; somebody may be in the detour.
    pub(crate) fn let_jump_go(&mut self, at: Gva, jump: Jump) {
        self.ghost_jumps.entry(at).or_default().push(jump);
    }

    /// Keeps what was prepared and not taken into use for another time.
    pub(crate) fn give_jumps_back(&mut self, prepared: impl IntoIterator<Item = (Gva, Jump)>) {
        for (at, jump) in prepared {
            self.let_jump_go(at, jump);
        }
    }

    /// Forgets what `ids` recorded with, once nothing of it is in the ring.
    pub(crate) fn forget_sources(&mut self, ids: impl IntoIterator<Item = ProbeId>) {
        let sources = ids.into_iter().filter_map(|id| self.sources.remove(id));
        self.ghost_sources.extend(sources);
    }

    /// Gives back what probe `id`, which was never planted, would have recorded with.
    pub(crate) fn free_source(&mut self, id: ProbeId, mem: &dyn PhysMemory) {
        if let Some(source) = self.sources.remove(id)
            && let Some(detours) = &mut self.region.detours
        {
            free(detours, &source, mem);
        }
    }

    /// What is left of probes that have gone.
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

    /// Whether much more is left behind than at the last look.
    pub(crate) fn is_crowded(&self) -> bool {
        let (left, kept, keep) = (self.left_behind(), &self.kept, &self.keep);
        left.code >= kept.code + keep.code
            || left.instances >= kept.instances + keep.instances
            || left.sources >= kept.sources + keep.sources
    }

    /// Forgets all of it: another kernel runs, and nobody comes there. What was recorded is still to be
    /// handed on.
    pub(crate) fn abandon(&mut self) {
        self.ghost_slots = Ghosts::default();
        self.ghost_jumps.clear();
        self.kept = Keep::NOTHING;
    }
}

/// Gives back what `source` records with.
pub(crate) fn free(detours: &mut Detours, source: &RecordSource, mem: &dyn PhysMemory) {
    detours.give_counters_back(source.words);
    if let Some(calls) = source.followed() {
        give_calls_back(detours, calls, mem);
    }
}

/// Gives back what `calls` are followed with.
pub(crate) fn give_calls_back(detours: &mut Detours, calls: &Followed, mem: &dyn PhysMemory) {
    detours.give_back(mem, calls.stubs, calls.code_len);
    detours.give_instances_back(calls.instances.at, calls.size());
}
