//! What becomes of the code and data of probes without exits that have left: calls in flight are
//! sent home, and what nobody can come to any more is given to others.
//!
//! Invariants: a call goes on to its caller, whatever has left meanwhile; memory is given back only
//! when no path leads to it ([`Paths`]), and that is looked at while the virtual CPUs stand still.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::Followed;
use hvprobe_hit::record::{NESTED_MAX, RecordSource};
use hvprobe_spec::ProbeId;
use tracing::info;

use crate::code::ours::free;
use crate::code::paths::{Lead, Paths};
use crate::code::scan::Still;
use crate::registry::state::Registry;
use crate::sites::site::SiteState;
use crate::unoptimized::Unoptimized;

/// The return probes that leave or have left, by where their stubs begin.
struct Gone<'a>(BTreeMap<Gva, &'a Followed>);

impl<'a> Gone<'a> {
    fn new(sources: impl IntoIterator<Item = &'a Arc<RecordSource>>) -> Self {
        let followed = sources.into_iter().filter_map(|source| source.followed());
        Self(followed.map(|calls| (calls.stubs, calls)).collect())
    }

    /// Where a call that goes on at `at` comes to behind the stubs of probes that are gone.
    fn beyond(&self, at: Gva, mem: &dyn PhysMemory) -> Gva {
        let mut at = at;
        for _ in 0..NESTED_MAX {
            let before = self.0.range(..=at).next_back();
            let Some(to) = before.and_then(|(_, calls)| calls.return_address(at, mem)) else {
                break;
            };
            at = to;
        }
        at
    }
}

impl Registry {
    /// Sends the calls in flight of the `leaving` probes to their callers, while the virtual CPUs
    /// stand still: a stack that leads to one of their stubs leads past it from now on, and so does
    /// an instance of another probe. Who has already returned to a stub finishes there.
    pub(crate) fn vacate_sources(&self, mem: &dyn PhysMemory) {
        let Some(live) = &self.live else { return };
        let sources: Vec<_> = self.code.sources.iter().collect();
        let leaves = |source: &&Arc<RecordSource>| self.probes.is_leaving(source.probe);
        let mut left = sources.iter().filter(leaves);
        if !left.any(|source| source.followed().is_some()) {
            return;
        }
        let gone = Gone::new(
            sources
                .iter()
                .filter(leaves)
                .chain(&self.code.ghost_sources),
        );
        for calls in gone.0.values() {
            calls.vacate(&live.view.tables, mem, |to| gone.beyond(to, mem));
        }
        for source in sources.iter().chain(&self.code.ghost_sources) {
            if let Some(calls) = source.followed() {
                calls.redirect(mem, |to| gone.beyond(to, mem));
            }
        }
    }

    /// Whether so much is left of probes that have gone that it is worth looking who may still come
    /// there: much more than at the last look, or there is no room for a detour.
    pub(crate) fn is_crowded(&self) -> bool {
        let lacks_room = |site: &SiteState| matches!(site.unprepared, Some(Unoptimized::NoRoom));
        self.code.is_crowded()
            || !self.code.ghost_sources.is_empty() && self.sites.values().any(lacks_room)
    }

    /// Gives back the detours of former jumps, and the stubs, instances and counters of probes that
    /// have left, that nobody can come to any more, when they take much room and a look
    /// was taken. After that look calls were sent to where `sent_to` says.
    pub(crate) fn reclaim_jumps(
        &mut self,
        mem: &dyn PhysMemory,
        still: Still<'_>,
        sent_to: &[Gva],
    ) {
        if !self.is_crowded() {
            return;
        }
        // A look does not see what the host writes.
        let Some(seen) = still.seen else { return };
        let sent_to = sent_to.iter().chain(self.sent_since.iter().flatten());
        let mut roots: Vec<Lead> = sent_to.copied().map(Lead::Address).collect();
        self.shared
            .returns
            .calls
            .live(|call| roots.push(Lead::Address(call.ret)));
        for source in self.code.sources.iter() {
            if let Some(calls) = source.followed() {
                roots.extend(calls.leads_to(mem).map(Lead::Address));
            }
        }
        let (paths, sources, jumps) = self.paths(mem);
        let reached = paths.reached(roots, |start, len| seen.code(start, len));
        let Some(detours) = self.code.region.detours.as_mut() else {
            return;
        };
        let stays = |piece: Option<&usize>| piece.is_none_or(|piece| reached[*piece]);
        self.code.ghost_jumps.retain(|_, ghosts| {
            ghosts.retain(|jump| {
                let start = jump.detour.at();
                let stays = stays(jumps.get(&start));
                if !stays {
                    detours.give_back(mem, start, jump.size());
                }
                stays
            });
            !ghosts.is_empty()
        });
        self.code.ghost_sources.retain(|source| {
            let stays = stays(sources.get(&source.probe));
            if !stays {
                free(detours, source, mem);
            }
            stays
        });
        let stay = reached.iter().filter(|reached| **reached).count();
        let given_back = reached.len() - stay;
        self.code.kept = self.code.left_behind();
        info!(stay, given_back, "memory of former probes");
    }

    /// What is left of probes that have gone, with the numbers of the pieces by probe and by where
    /// a detour begins.
    fn paths(
        &self,
        mem: &dyn PhysMemory,
    ) -> (Paths, BTreeMap<ProbeId, usize>, BTreeMap<Gva, usize>) {
        let mut paths = Paths::default();
        let mut sources = BTreeMap::new();
        for source in &self.code.ghost_sources {
            let piece = match source.followed() {
                None => paths.piece(None, Vec::new()),
                Some(calls) => {
                    let leads = calls.leads_to(mem).map(Lead::Address).collect();
                    paths.piece(Some((calls.stubs, calls.code_len)), leads)
                }
            };
            sources.insert(source.probe, piece);
        }
        let mut jumps = BTreeMap::new();
        for jump in self.code.ghost_jumps.values().flatten() {
            let members = jump.members.iter().filter_map(|id| sources.get(id));
            let leads = members.map(|piece| Lead::Piece(*piece)).collect();
            let start = jump.detour.at();
            jumps.insert(start, paths.piece(Some((start, jump.size())), leads));
        }
        (paths, sources, jumps)
    }
}
