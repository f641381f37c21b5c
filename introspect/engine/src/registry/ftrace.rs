//! The sites that the guest's ftrace patches, and whether ftrace may be patching them.
//!
//! Invariant: while ftrace may be patching, its sites hold nothing of ours, because ftrace checks the text that it
//! patches. The states are in [`super::hook_state`].

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;
use tracing::info;

use crate::registry::hook_state::{Ftrace, Patches};
use crate::registry::live::Live;
use crate::sites::probes::Probes;
use crate::sites::site::{SiteState, Sites, patched};
use crate::sites::text::Text;

/// Function that ftrace calls before it patches, with its lock held (kernel/trace/ftrace.c,
/// `ftrace_run_update_code`).
pub(crate) const FTRACE_BEGINS: &str = "ftrace_arch_code_modify_prepare";

/// Length of an ENDBR64.
pub(crate) const ENDBR: u64 = 4;
/// Length of the instruction that ftrace patches (`MCOUNT_INSN_SIZE` in arch/x86/include/asm/ftrace.h).
pub(crate) const FTRACE: u64 = 5;

/// Returns whether a probe or hook is at a place that the guest's ftrace patches.
pub(crate) fn has_ftrace_sites(sites: &Sites, probes: &Probes) -> bool {
    let is_used = |site: &SiteState| {
        site.internal.is_some() || site.members.iter().any(|id| !probes.is_leaving(*id))
    };
    sites
        .values()
        .any(|site| site.point.ftrace && is_used(site))
}

/// Finds out from ftrace's lock whether the guest's ftrace may be patching. Does nothing if the hooks watch ftrace:
/// the lock matters only because ftrace may have begun before the hooks were there. The virtual CPUs must be
/// stopped.
pub(crate) fn look_at_ftrace(
    ftrace: &mut Ftrace,
    sites: &Sites,
    probes: &Probes,
    live: Option<&Live>,
    mem: &dyn PhysMemory,
) {
    if ftrace.watched {
        return;
    }
    let is_held = has_ftrace_sites(sites, probes) && is_ftrace_locked(ftrace, live, mem);
    if is_held {
        info!("the guest's ftrace may be patching: probes at function entries wait for it");
    }
    ftrace.patches = match is_held {
        true => Patches::Perhaps,
        false => Patches::No,
    };
}

/// Returns whether ftrace's lock is held, as it is while the guest's ftrace patches. If the lock is not known,
/// returns whether the hooks have seen ftrace begin.
pub(crate) fn is_ftrace_locked(ftrace: &Ftrace, live: Option<&Live>, mem: &dyn PhysMemory) -> bool {
    let (Some(live), Some(lock)) = (live, ftrace.lock) else {
        return ftrace.patches == Patches::Yes;
    };
    lock.is_held(&live.view.tables, mem)
}

/// Returns whether the hook at the beginning of ftrace's patching is armed.
pub(crate) fn watches_ftrace(image: &KernelImage, sites: &Sites) -> bool {
    let Some(entry) = image.symbols().address_of(FTRACE_BEGINS) else {
        return false;
    };
    let is_watched = |site: &SiteState| site.internal.is_some() && site.is_armed() && !site.gone;
    // The hook is after the ENDBR, if there is one, and after the instruction that ftrace patches.
    let mut sites = sites.range(entry..=entry.wrapping_add(ENDBR + FTRACE));
    sites.any(|(_, site)| is_watched(site))
}

/// Leaves to the guest's ftrace, after it has patched, the `sites` that hold its call instead of the nop. All other
/// sites are ours again.
pub(crate) fn leave_to_ftrace(sites: &mut Sites, tables: &PageTables, mem: &dyn PhysMemory) {
    let text = Text { tables, mem };
    let taken = sites.iter().filter(|(at, site)| {
        let own = site.point.displaced.bytes();
        let ours = || patched(sites, **at, own, |_, site| &site.patch);
        site.point.ftrace && !site.is_armed() && !text.holds(**at, &ours())
    });
    let taken: BTreeSet<Gva> = taken.map(|(at, _)| *at).collect();
    for (at, site) in sites {
        site.occupied = taken.contains(at);
    }
    if !taken.is_empty() {
        info!(sites = taken.len(), "left to the guest's ftrace");
    }
}
