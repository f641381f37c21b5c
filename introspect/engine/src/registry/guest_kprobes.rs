//! Coexistence of the guest's own kprobes and our patches.
//!
//! A kprobe of the guest keeps a copy of the instruction at which it was registered. At any time it may be armed,
//! which writes an int3, or disarmed, which writes the first byte of that copy. A hit resumes in the text after the
//! copied instruction. An optimized kprobe writes a jump, for which at most [`REACH`](crate::guest::kprobes) bytes
//! are replaced or copied. None of this checks the text again (kernel/kprobes.c, arch/x86/kernel/kprobes/opt.c). If
//! the guest writes its int3 over one of ours, the int3 belongs to the guest from then on, and our probe is gone.
//! If a jump of ours is there, or was there when the guest copied the instruction, the guest would resume in the
//! middle of an instruction.
//!
//! Invariant: no jump of ours is where a kprobe of the guest is registered, armed or not, and the guest
//! registers none where a jump is. So the engine reads the guest's table of kprobes in the stop in which a jump
//! is to be written, and does not write the jump while the table's mutex is held: then a kprobe may be about to
//! be added to the table. And the engine holds the guest where it is about to copy an instruction, until no
//! jump is there any more ([`kprobe_registration`](super::kprobe_registration)). If a jump cannot be removed, the
//! copying function fails at once, and with it the guest's registration.
//!
//! Invariant: no int3 of ours is planted where a registered kprobe of the guest may write its jump. The guest
//! decides on that jump when the kprobe is registered. When it writes the jump it saves the text there, and it
//! would restore a saved int3 after we have forgotten it. If an int3 of ours is there when the guest decides,
//! it writes no jump; the kprobe is in the table by then.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use tracing::warn;

use crate::code::jump::Jump;
use crate::code::ours::OurCode;
use crate::guest::kprobes::{GuestKprobes, Known, Unknown, first_that_meets, one_over};
use crate::refusal::{Obstacle, Obstacles, Refused};
use crate::registry::live::Live;
use crate::registry::optimize::Rules;
use crate::sites::probes::Probes;
use crate::sites::site::{Patch, SiteState, Sites};
use crate::unoptimized::Unoptimized;

/// Returns whether the engine has to watch the function in which the guest registers kprobes.
pub(crate) fn has_to_know_kprobes(rules: &Rules<'_>) -> bool {
    let stays = |id| !rules.probes.is_leaving(id);
    let jumps = rules
        .sites
        .values()
        .any(|site| site.point.span.is_ok() && site.members.iter().any(|id| stays(*id)));
    let possible = rules.switches.optimize && rules.has_detours;
    possible && jumps && matches!(rules.kprobes.known, Known::Table(_))
}

/// Reads the addresses of the guest's registered kprobes.
pub(crate) fn read_kprobes(kprobes: &mut GuestKprobes, live: Option<&Live>, mem: &dyn PhysMemory) {
    if let Some(live) = live {
        kprobes.read(&live.view.tables, mem);
    }
}

/// Retires those of the prepared `jumps` that would or may meet a kprobe of the guest, and notes the reason at
/// their `sites`. The virtual CPUs must be stopped.
pub(crate) fn retire_at_kprobes(
    jumps: &mut BTreeMap<Gva, Jump>,
    known: &Known,
    sites: &mut Sites,
    code: &mut OurCode,
    tables: &PageTables,
    mem: &dyn PhysMemory,
) {
    let Known::Table(layout) = known else {
        return;
    };
    if jumps.is_empty() {
        return;
    }
    let registered = layout.settled(tables, mem);
    let unused = jumps.extract_if(.., |at, _| {
        let site = sites.get_mut(at);
        let why = match (&registered, site.as_deref()) {
            // The jump replaces another, so the guest has no kprobe there.
            (Err(Unknown), Some(site)) if site.jump().is_some() => None,
            (Err(Unknown), _) => Some(Unoptimized::KprobesChange),
            (Ok(registered), site) => site
                .and_then(|site| first_that_meets(site.point.span.as_ref().ok()?, registered))
                .map(|at| Unoptimized::Kprobe { at }),
        };
        let is_unused = why.is_some();
        if let Some(site) = site.filter(|_| is_unused) {
            site.unprepared = why;
        }
        is_unused
    });
    code.retire_jumps(unused);
}

/// Checks that no jump of a kprobe of the guest may cover a site in `arming` that has no patch yet. The virtual
/// CPUs must be stopped.
///
/// # Errors
/// The sites that such a jump may cover.
pub(crate) fn keep_from_kprobes(
    arming: &[(Gva, Patch)],
    known: &Known,
    sites: &Sites,
    tables: &PageTables,
    mem: &dyn PhysMemory,
) -> Result<(), Obstacles> {
    let is_new = |at: &Gva| sites.get(at).is_some_and(|site| !site.is_armed());
    let mut new = arming.iter().map(|(at, _)| *at).filter(is_new).peekable();
    let (Known::Table(layout), Some(_)) = (known, new.peek()) else {
        return Ok(());
    };
    let Ok(registered) = layout.registered(tables, mem) else {
        return Ok(());
    };
    let covered = new.filter_map(|at| {
        let kprobe = one_over(at, &registered)?;
        let why = Refused::UnderKprobe { at, kprobe };
        Some(Obstacle { at, why })
    });
    Obstacles::of(covered).map_or(Ok(()), Err)
}

/// Leaves a site to the guest if the jump of one of the guest's `registered` kprobes may cover it. Applies only to
/// sites that have an enabled probe and no patch yet.
pub(crate) fn leave_covered(sites: &mut Sites, probes: &Probes, registered: &BTreeSet<Gva>) {
    let covered = |at: &Gva, site: &SiteState| {
        let is_new = !site.is_armed() && !site.gone && probes.any_enabled(&site.members);
        is_new && one_over(*at, registered).is_some()
    };
    for (at, site) in sites {
        if covered(at, site) {
            warn!(%at, "a jump of the guest's own kprobe may come to cover a probe");
            site.gone = true;
        }
    }
}

/// Leaves to the guest the `sites` where its int3 has replaced ours. That happens if the guest had begun to
/// register a kprobe there before we planted ours; a kprobe is in the table as long as it is armed. The virtual
/// CPUs must be stopped.
pub(crate) fn leave_to_kprobes(
    known: &Known,
    sites: &mut Sites,
    tables: &PageTables,
    mem: &dyn PhysMemory,
) {
    let Known::Table(layout) = known else {
        return;
    };
    let Ok(armed) = layout.armed(tables, mem) else {
        return;
    };
    for at in armed {
        let site = sites.get_mut(&at);
        let is_int3 = |site: &&mut SiteState| matches!(site.patch, Patch::Breakpoint);
        if let Some(site) = site.filter(|site| is_int3(site) && !site.gone) {
            warn!(%at, "the guest has a kprobe of its own where one of ours was");
            site.gone = true;
            site.patch = Patch::None;
        }
    }
}
