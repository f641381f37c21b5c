//! Releases code and data of probes without exits when they leave: makes their calls in flight return directly to
//! the callers, and releases what no task can reach any more.
//!
//! Invariants: a call returns to its caller, even if probes have been unregistered meanwhile; memory is released
//! only when no path leads to it ([`Paths`]), which is checked while the virtual CPUs are stopped.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_hit::Followed;
use hvprobe_hit::calls::Calls;
use hvprobe_hit::record::{NESTED_MAX, RecordSource};
use hvprobe_spec::ProbeId;
use tracing::info;

use crate::code::ours::{OurCode, release_data};
use crate::code::paths::{Lead, Paths};
use crate::code::scan::Seen;
use crate::sites::probes::Probes;
use crate::sites::site::{SiteState, Sites};
use crate::unoptimized::Unoptimized;

/// The return probes that are leaving or have left, by the addresses of their stubs.
struct Gone<'a>(BTreeMap<Gva, &'a Followed>);

impl<'a> Gone<'a> {
    fn new(sources: impl IntoIterator<Item = &'a Arc<RecordSource>>) -> Self {
        let followed = sources.into_iter().filter_map(|source| source.followed());
        Self(followed.map(|calls| (calls.stubs, calls)).collect())
    }

    /// Follows the return address `at` through all stubs of gone probes. Returns the address at which the call
    /// finally continues.
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

/// Makes calls in flight bypass the stubs of leaving probes: where a stub's address is on a stack, or in an
/// instance of another probe, writes the address to which that stub would return. A task that is already in a stub
/// runs it to its end. The virtual CPUs must be stopped.
pub(crate) fn restore_followed_frames(
    probes: &Probes,
    code: &OurCode,
    tables: &PageTables,
    mem: &dyn PhysMemory,
) {
    let sources: Vec<_> = code.sources.iter().collect();
    let leaves = |source: &&Arc<RecordSource>| probes.is_leaving(source.probe);
    let mut left = sources.iter().filter(leaves);
    if !left.any(|source| source.followed().is_some()) {
        return;
    }
    let gone = Gone::new(sources.iter().filter(leaves).chain(&code.ghost_sources));
    for calls in gone.0.values() {
        calls.restore_frames(tables, mem, |to| gone.beyond(to, mem));
    }
    for source in sources.iter().chain(&code.ghost_sources) {
        if let Some(calls) = source.followed() {
            calls.redirect(mem, |to| gone.beyond(to, mem));
        }
    }
}

/// Returns whether a look for tasks in ghosts is worth its cost: the ghosts take much more memory than at the last
/// look, or there is no room for a detour.
pub(crate) fn is_crowded(code: &OurCode, sites: &Sites) -> bool {
    let lacks_room = |site: &SiteState| matches!(site.unprepared, Some(Unoptimized::NoRoom));
    code.is_crowded() || !code.ghost_sources.is_empty() && sites.values().any(lacks_room)
}

/// Releases what no task can reach any more: detours of retired jumps, and stubs, instances and counters of former
/// probes. The virtual CPUs must be stopped. `seen` has the addresses that a look through the guest's memory found.
/// `calls` are the calls that return through the trampoline. `sent_to` has the addresses that the engine has
/// written into frames of such calls since the look began, because the look does not see these writes.
pub(crate) fn release_unreached(
    code: &mut OurCode,
    seen: &Seen,
    sent_to: impl IntoIterator<Item = Gva>,
    calls: &Calls,
    mem: &dyn PhysMemory,
) {
    let mut roots: Vec<Lead> = sent_to.into_iter().map(Lead::Address).collect();
    calls.live(|call| roots.push(Lead::Address(call.ret)));
    for source in code.sources.iter() {
        if let Some(calls) = source.followed() {
            roots.extend(calls.leads_to(mem).map(Lead::Address));
        }
    }
    let pieces = Pieces::of(code, mem);
    let reached = pieces
        .paths
        .reached(roots, |start, len| seen.code(start, len));
    let Some(detours) = code.region.detours.as_mut() else {
        return;
    };
    let stays = |piece: Option<&usize>| piece.is_none_or(|piece| reached[*piece]);
    code.ghost_jumps.retain(|_, ghosts| {
        ghosts.retain(|jump| {
            let start = jump.detour.at();
            let stays = stays(pieces.jumps.get(&start));
            if !stays {
                detours.release(mem, start, jump.size());
            }
            stays
        });
        !ghosts.is_empty()
    });
    code.ghost_sources.retain(|source| {
        let stays = stays(pieces.sources.get(&source.probe));
        if !stays {
            release_data(detours, source, mem);
        }
        stays
    });
    let stay = reached.iter().filter(|reached| **reached).count();
    let released = reached.len() - stay;
    code.kept = code.left_behind();
    info!(stay, released, "memory of former probes");
}

/// The code and data of former probes as pieces in `paths`, with the index of each piece.
struct Pieces {
    paths: Paths,
    /// Indexes of the probes' stubs and data, by the probes.
    sources: BTreeMap<ProbeId, usize>,
    /// Indexes of the detours, by their starts.
    jumps: BTreeMap<Gva, usize>,
}

impl Pieces {
    fn of(code: &OurCode, mem: &dyn PhysMemory) -> Self {
        let mut paths = Paths::default();
        let mut sources = BTreeMap::new();
        for source in &code.ghost_sources {
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
        for jump in code.ghost_jumps.values().flatten() {
            let members = jump.members.iter().filter_map(|id| sources.get(id));
            let leads = members.map(|piece| Lead::Piece(*piece)).collect();
            let start = jump.detour.at();
            jumps.insert(start, paths.piece(Some((start, jump.size())), leads));
        }
        Self {
            paths,
            sources,
            jumps,
        }
    }
}
