//! Proof that no task may reach the bytes under a jump.
//!
//! A task that was interrupted just before an instruction under the jump resumes there. So does a task that was
//! interrupted in a copy, in a slot or a detour, that ends in a jump to that instruction. If the jump's byte at an
//! instruction is an int3 ([`Span::fits`]), the task hits it and is sent to the copy of the instruction. For all
//! other instructions a [look](crate::code::scan) proves that no word of the guest's memory and no virtual CPU
//! leads there. Until a look proves this, the site keeps its int3, and the look is repeated later. Nothing waits
//! for the later look, because a look through much memory takes long.
//!
//! [`Span::fits`]: hvprobe_arch::detour::Span::fits

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Span;
use tracing::debug;

use crate::code::jump::Jump;
use crate::code::ours::OurCode;
use crate::code::scan::Seen;
use crate::sites::site::{SiteState, Sites};
use crate::unoptimized::Unoptimized;

/// Places that no task may be about to reach when the jump at `site` is written.
struct Unproven {
    site: Gva,
    points: Vec<Gva>,
    /// Copies that lead to one of the points: start and length.
    copies: Vec<(Gva, u64)>,
}

/// Returns the addresses of those instructions under the jump at which the jump's byte cannot be an int3.
fn boundaries_without_int3(span: &Span) -> Vec<Gva> {
    let inside = span.interior().filter(|offset| *offset > 2);
    inside
        .map(|offset| span.at().wrapping_add(offset))
        .collect()
}

/// Returns what must be proved before a jump is written at the site `at`; `None` if there is nothing to prove.
fn unproven(at: Gva, site: &SiteState, code: &OurCode) -> Option<Unproven> {
    let points = boundaries_without_int3(site.point.span.as_ref().ok()?);
    if points.is_empty() || site.jump().is_some() {
        return None;
    }
    let slots = code.ghost_slots.iter();
    let slots = slots.map(|(displaced, code)| (*displaced, *code));
    let own = site.slot.map(|code| (site.point.displaced, code));
    let slots = slots.chain(own).filter_map(|(displaced, code)| {
        let leads = displaced.leads_to().any(|to| points.contains(&to));
        leads.then(|| (code.at(), code.bytes().len() as u64))
    });
    let ghosts = code.ghost_jumps.iter();
    let others = ghosts.filter(|(of, _)| **of != at);
    let detours = others.flat_map(|(_, jumps)| jumps).filter_map(|jump| {
        let leads = jump.detour.leads_to().any(|to| points.contains(&to));
        leads.then(|| (jump.detour.at(), jump.detour.code().len() as u64))
    });
    let copies = slots.chain(detours).collect();
    Some(Unproven {
        site: at,
        points,
        copies,
    })
}

/// Returns the places that no task may be about to reach when jumps are written at `these` sites.
pub(crate) fn unproven_points<'a>(
    these: impl Iterator<Item = (Gva, &'a SiteState)>,
    code: &OurCode,
) -> BTreeSet<Gva> {
    let unproven = these.filter_map(|(at, site)| unproven(at, site, code));
    unproven.flat_map(|it| it.points).collect()
}

/// Retires those of the prepared `jumps` that a task may be under, and notes the reason at their sites. The virtual
/// CPUs must be stopped; `seen` is the result of a look, if there is one.
pub(crate) fn retire_unproven(
    jumps: &mut BTreeMap<Gva, Jump>,
    sites: &mut Sites,
    code: &mut OurCode,
    seen: Option<&Seen>,
) {
    let unproven: Vec<Unproven> = jumps
        .keys()
        .filter_map(|at| unproven(*at, sites.get(at)?, code))
        .collect();
    for Unproven {
        site,
        points,
        copies,
    } in unproven
    {
        let is_clear = seen.is_some_and(|seen| {
            let in_copy = copies.iter().any(|(start, len)| seen.code(*start, *len));
            !in_copy && !points.iter().any(|point| seen.point(*point))
        });
        if is_clear {
            continue;
        }
        debug!(at = %site, "somebody may be under the jump");
        if let Some(jump) = jumps.remove(&site) {
            code.retire_jump(site, jump);
        }
        if let Some(site) = sites.get_mut(&site) {
            site.unprepared = Some(Unoptimized::Interrupted);
        }
    }
}
