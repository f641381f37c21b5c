//! What probes without exits record with: their sources of records, the instances and the code of
//! those that follow calls, and what is left of all that when they have gone.
//!
//! Invariant: what a detour, or a call in flight, refers to stays as it is until no word of the
//! guest's memory leads there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{
    Capture, EntryCapture, Exit, InstanceLayout, Instances, ReturnCode, STUB,
};
use hvprobe_arch::mem::PhysMemory;
use tracing::{debug, info};

use super::ProbeId;
use super::jump::{Jump, Surroundings, Unoptimized, unfollowable};
use super::registry::Registry;
use super::site::{Probe, SiteState};
use super::spec::{Actions, Item};
use crate::hidden::HiddenError;
use crate::hidden::detours::{CounterPlace, Detours, aligned};
use crate::hidden::follow::Followed;
use crate::ring::{Source, Tallies, What};
use crate::world::Standing;

/// With this many bytes of instances, or this many counters, of probes that have left, likewise.
const GHOST_INSTANCES_MAX: u64 = 1 << 20;
const GHOST_COUNTERS_MAX: usize = 8192;
/// With this many bytes of detours that have no site, it is worth looking who is inside.
const GHOSTS_MAX: u64 = 1 << 20;

fn stack_words(actions: &Actions) -> Vec<u16> {
    let words = actions.capture.iter().filter_map(|item| match item {
        Item::Stack(word) => Some(*word),
        Item::Memory { .. } => None,
    });
    words.collect()
}

/// What is recorded for a probe with these actions: at its hits, or when a function returns.
fn capture(probe: &Probe, around: &Surroundings) -> Capture {
    let stack = match probe.pool {
        None => stack_words(&probe.actions),
        Some(_) => Vec::new(),
    };
    Capture {
        registers: probe.actions.registers,
        stack,
        task: around.task,
        cpu: around.cpu,
    }
}

/// What is kept of a call at its entry.
fn entry_capture(actions: &Actions, around: &Surroundings) -> EntryCapture {
    EntryCapture {
        registers: actions.registers,
        stack: stack_words(actions),
        current: around.task.map(|task| task.current),
    }
}

impl Registry {
    /// What turns the records of probe `id` into events.
    pub(super) fn source(
        &mut self,
        id: ProbeId,
        at: Gva,
        around: &Surroundings,
        mem: &dyn PhysMemory,
    ) -> Result<Arc<Source>, Unoptimized> {
        if let Some(source) = self.sources.get(id) {
            return Ok(source);
        }
        let (Some(probe), Some(detours)) = (self.probes.get(&id), &mut self.hidden.detours) else {
            return Err(Unoptimized::NoRoom);
        };
        let words = detours.take_counters(mem).ok_or(Unoptimized::NoRoom)?;
        let capture = capture(probe, around);
        let followed = match &probe.pool {
            None => None,
            Some(pool) => {
                let entry = entry_capture(&probe.actions, around);
                let exit = Leaving {
                    source: id,
                    capture: &capture,
                    entry: &entry,
                    words,
                    first_stub: self.next_stub,
                };
                let followed = follow(detours, pool.limit(), &exit, around, mem)?;
                self.next_stub = self.next_stub.saturating_add(pool.limit());
                Some((entry, Arc::new(followed)))
            }
        };
        let place = |at| detours.word(at).ok_or(Unoptimized::NoRoom);
        let tallies = Tallies {
            lost: place(words.lost())?,
            vetoed: place(words.vetoed())?,
            missed: place(words.missed())?,
        };
        let (actions, counters) = (Arc::clone(&probe.actions), Arc::clone(&probe.counters));
        let what = What {
            at,
            capture,
            followed,
        };
        let source = Arc::new(Source::new(id, what, actions, counters, words, tallies)?);
        self.sources.add(Arc::clone(&source));
        Ok(source)
    }

    /// The return probes of `site` whose calls need an exit at their entry only, if all return probes
    /// there are such: of one frame, what takes the trampoline and what does not would get into each
    /// other's way.
    fn half_followed<'s>(
        &'s self,
        site: &'s SiteState,
        leaving: &'s BTreeSet<ProbeId>,
    ) -> impl Iterator<Item = ProbeId> + 's {
        let returning = || {
            let members = self.enabled_members(site, leaving);
            members.filter(|(_, probe)| probe.pool.is_some())
        };
        let can_be = |probe: &Probe| {
            let actions = &probe.actions;
            probe.spec.budget.is_none()
                && actions.capture.is_empty()
                && unfollowable(probe).is_none()
        };
        let possible = self.optimize && returning().all(|(_, probe)| can_be(probe));
        returning().filter(move |_| possible).map(|(id, _)| id)
    }

    /// The return probes, and where they are, that need code that calls return to once `leaving` have
    /// left, and not a detour, which brings it with it.
    pub(super) fn wanted_stubs(&self, leaving: &BTreeSet<ProbeId>) -> Vec<(Gva, ProbeId)> {
        let mut wanted = Vec::new();
        for (at, site) in &self.sites {
            let missing = self.half_followed(site, leaving);
            let missing = missing.filter(|id| self.sources.get(*id).is_none());
            let before = wanted.len();
            wanted.extend(missing.map(|id| (*at, id)));
            let is_for_jump = || self.fit(site, leaving).is_ok();
            if wanted.len() > before
                && (site.gone || !self.is_wanted(site, leaving) || is_for_jump())
            {
                wanted.truncate(before);
            }
        }
        wanted
    }

    /// Makes that code; where there is no room, calls return through the trampoline.
    pub(super) fn make_stubs(
        &mut self,
        wanted: &[(Gva, ProbeId)],
        around: &Surroundings,
        mem: &dyn PhysMemory,
    ) {
        for (at, id) in wanted {
            if let Err(why) = self.source(*id, *at, around, mem) {
                debug!(%at, %why, "a return takes an exit");
            }
        }
    }

    /// What makes events of the returns of the probes at `site` that need no exit then.
    pub(super) fn stubs(
        &self,
        site: &SiteState,
        leaving: &BTreeSet<ProbeId>,
    ) -> BTreeMap<ProbeId, Arc<Source>> {
        let ids = self.half_followed(site, leaving);
        let sources = ids.map(|id| Some((id, self.sources.get(id)?)));
        sources.collect::<Option<_>>().unwrap_or_default()
    }

    /// Forgets what the `leaving` probes recorded with, once nothing of it is in the ring.
    pub(super) fn forget_sources(&mut self, leaving: &BTreeSet<ProbeId>) {
        let sources = leaving.iter().filter_map(|id| self.sources.remove(*id));
        self.ghost_sources.extend(sources);
    }

    /// Gives back what probe `id`, which was never planted, would have recorded with.
    pub(super) fn free_source(&mut self, id: ProbeId, mem: &dyn PhysMemory) {
        let (Some(source), Some(detours)) = (self.sources.remove(id), &mut self.hidden.detours)
        else {
            return;
        };
        detours.give_counters_back(source.words);
        if let Some(calls) = source.followed() {
            detours.give_back(mem, calls.stubs, calls.code_len);
            detours.give_instances_back(calls.instances.at, calls.len());
        }
    }

    /// Lets calls of the `leaving` probes return to their callers on their own, and tells the
    /// reader who is enabled, while the virtual CPUs stand still.
    pub(super) fn settle_sources(&self, leaving: &BTreeSet<ProbeId>, mem: &dyn PhysMemory) {
        let Some(live) = &self.live else { return };
        for source in self.sources.iter() {
            let id = source.probe;
            source.set_enabled(self.switched_on && self.is_enabled(id, leaving));
            if leaving.contains(&id)
                && let Some(followed) = source.followed()
            {
                followed.vacate(&live.view.tables, mem);
            }
        }
    }

    /// Gives back the detours of former jumps that nobody can be inside of, and what only they used,
    /// when they take much room: it takes looking through all of the guest's memory.
    pub(super) fn reclaim_jumps(&mut self, mem: &dyn PhysMemory, standing: &[Standing]) {
        let size = |jump: &Jump| jump.detour.code().len() as u64;
        let ghosts = self.ghost_jumps.values().flatten().map(size);
        let followed = self
            .ghost_sources
            .iter()
            .filter_map(|source| source.followed());
        let (code, instances) = followed.fold((ghosts.sum::<u64>(), 0), |(code, bytes), calls| {
            (code + calls.code_len, bytes + calls.len())
        });
        let is_much = code >= GHOSTS_MAX
            || instances >= GHOST_INSTANCES_MAX
            || self.ghost_sources.len() >= GHOST_COUNTERS_MAX;
        if !is_much {
            return;
        }
        let standing = standing.iter().map(|cpu| cpu.rip);
        let (Some(used), Some(detours)) = (
            self.hidden.referenced(mem, standing),
            self.hidden.detours.as_mut(),
        ) else {
            return;
        };
        let mut stay = 0;
        self.ghost_jumps.retain(|_, jumps| {
            jumps.retain(|jump| {
                let start = jump.detour.at();
                let inside = |at: &Gva| {
                    at.offset_from(start)
                        .is_some_and(|offset| offset < size(jump))
                };
                let stays = used.iter().any(inside);
                if !stays {
                    detours.give_back(mem, start, size(jump));
                }
                stays
            });
            stay += jumps.len();
            !jumps.is_empty()
        });
        let entered: BTreeSet<ProbeId> = self
            .ghost_jumps
            .values()
            .flatten()
            .flat_map(|jump| jump.members.iter().copied())
            .collect();
        self.ghost_sources.retain(|source| {
            let entered = entered.contains(&source.probe);
            let followed = source.followed();
            let left = followed.is_some_and(|calls| used.iter().any(|at| calls.is_code(*at)));
            if entered || left {
                return true;
            }
            detours.give_counters_back(source.words);
            if let Some(calls) = followed {
                detours.give_back(mem, calls.stubs, calls.code_len);
                detours.give_instances_back(calls.instances.at, calls.len());
            }
            false
        });
        info!(stay, "detours of former probes given back");
    }
}

/// What is to be made of a return probe.
struct Leaving<'a> {
    source: ProbeId,
    capture: &'a Capture,
    entry: &'a EntryCapture,
    words: CounterPlace,
    first_stub: u32,
}

/// Makes `count` instances and the code that their calls return to.
fn follow(
    detours: &mut Detours,
    count: u32,
    leaving: &Leaving<'_>,
    around: &Surroundings,
    mem: &dyn PhysMemory,
) -> Result<Followed, Unoptimized> {
    let layout = InstanceLayout::new(leaving.entry)?;
    let (bytes, first) = layout.initial(count);
    let stride = layout.stride() as u64;
    let room = detours.take_instances(mem, &bytes, stride);
    let (at, gpa) = room.ok_or(Unoptimized::NoRoom)?;
    let free = leaving.words.free();
    let instances = Instances { at, count, free };
    let exit = Exit {
        source: leaving.source.0,
        capture: leaving.capture,
        instances: &instances,
        entry: leaving.entry,
        lost: leaving.words.lost(),
        first_stub: leaving.first_stub,
    };
    let made = ReturnCode::new(&around.ring, &exit)
        .map_err(Unoptimized::from)
        .and_then(|code| {
            let code_len = code.code().len() as u64;
            let stubs = detours.take(code_len, aligned(u64::from(STUB)));
            let stubs = stubs.ok_or(Unoptimized::NoRoom)?;
            detours.fill(mem, stubs, code.code())?;
            let free = detours.word(free).ok_or(Unoptimized::NoRoom)?;
            mem.write_u64(free, first).map_err(HiddenError::from)?;
            Ok(Followed {
                instances,
                layout,
                at: gpa,
                free,
                stubs,
                code_len,
            })
        });
    if made.is_err() {
        detours.give_instances_back(at, bytes.len() as u64);
    }
    made
}
