//! Data that probes without exits record with: the sources of records and, for return probes, instances and
//! stubs.
//!
//! Invariant: data that a detour or a call in flight refers to stays unchanged as long as `release.rs` finds
//! that a task may reach it.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{
    Capture, EntryCapture, Exit, Fetching, InstanceLayout, Instances, ReturnCode, STUB, StackFields,
};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::{Gpr, RegisterSet};
use hvprobe_hit::Followed;
use hvprobe_hit::record::{RecordSource, RecordSources, Tallies, What};
use hvprobe_hit::region::CounterPlace;
use hvprobe_spec::{Actions, Item, ProbeId};
use tracing::debug;

use crate::code::detours::{Detours, aligned};
use crate::code::error::HiddenError;
use crate::code::jump::DetourContext;
use crate::code::ours::{OurCode, release_calls};
use crate::registry::optimize::{Rules, unfollowable};
use crate::registry::switches::Switches;
use crate::sites::probes::Probes;
use crate::sites::site::{Probe, SiteState};
use crate::unoptimized::Unoptimized;

fn stack_words(actions: &Actions) -> Vec<u16> {
    let words = actions.capture.iter().filter_map(|item| match item {
        Item::Stack(word) => Some(*word),
        Item::Memory { .. } | Item::Fetched(_) | Item::StackTrace(_) => None,
    });
    words.collect()
}

/// Returns the memory reads of a probe with these actions, if there are any and the guest has functions for
/// them.
fn fetching(actions: &Actions, around: &DetourContext) -> Option<Fetching> {
    let items: Vec<_> = actions.capture.iter().filter_map(Item::fetched).collect();
    let readers = around.readers.filter(|_| !items.is_empty())?;
    Some(Fetching { readers, items })
}

/// Registers from which unwinding a stack starts.
const OF_STACKS: [Gpr; 6] = [Gpr::Rsp, Gpr::Rbp, Gpr::Rdx, Gpr::Rdi, Gpr::R10, Gpr::R13];

/// Returns the location of the stack to copy; `None` if a probe with these actions copies none, or cannot copy it.
fn stack_copy(actions: &Actions, around: &DetourContext) -> Option<StackFields> {
    around.stack.filter(|_| actions.record_stacks())
}

/// Returns the registers to record if those in `shown` are to be shown. The return value is always recorded at
/// a return.
fn recorded(shown: RegisterSet, returns: bool) -> RegisterSet {
    shown.iter().chain(returns.then_some(Gpr::Rax)).collect()
}

/// Returns what is recorded for a probe: at its hits, or at returns if it is a return probe.
fn capture(probe: &Probe, around: &DetourContext) -> Capture {
    let (stack, fetching, stack_copy) = match probe.pool {
        None => (
            stack_words(&probe.actions),
            fetching(&probe.actions, around),
            stack_copy(&probe.actions, around),
        ),
        Some(_) => (Vec::new(), None, None),
    };
    let shown = recorded(probe.actions.registers, probe.pool.is_some());
    let followed_from = OF_STACKS.into_iter().filter(|_| stack_copy.is_some());
    Capture {
        registers: shown.iter().chain(followed_from).collect(),
        stack,
        task: around.task,
        cpu: around.cpu,
        fetching,
        stack_copy,
    }
}

/// Returns what is saved at the entry of a call.
fn entry_capture(actions: &Actions, around: &DetourContext) -> EntryCapture {
    EntryCapture {
        registers: actions.registers,
        stack: stack_words(actions),
        current: around.task.map(|task| task.current),
        cpu: around.cpu,
    }
}

/// Returns the source that turns records of probe `id`, whose site is at `at`, into events; creates it if needed.
pub(crate) fn source(
    id: ProbeId,
    at: Gva,
    probes: &Probes,
    code: &mut OurCode,
    around: &DetourContext,
    mem: &dyn PhysMemory,
) -> Result<Arc<RecordSource>, Unoptimized> {
    if let Some(source) = code.sources.get(id) {
        return Ok(source);
    }
    let (Some(probe), Some(detours)) = (probes.get(id), &mut code.region.detours) else {
        return Err(Unoptimized::NoRoom);
    };
    let words = detours.take_counters(mem).ok_or(Unoptimized::NoRoom)?;
    let number = code.source_number();
    let Some(detours) = &mut code.region.detours else {
        return Err(Unoptimized::NoRoom);
    };
    let capture = capture(probe, around);
    let mut calls = None;
    let mut make = || {
        let place = |detours: &Detours, at| detours.word(at).ok_or(Unoptimized::NoRoom);
        let tallies = Tallies {
            lost: place(detours, words.lost())?,
            vetoed: place(detours, words.vetoed())?,
            missed: place(detours, words.missed())?,
        };
        let followed = match &probe.pool {
            None => None,
            Some(pool) => {
                let entry = entry_capture(&probe.actions, around);
                let exit = Leaving {
                    source: number,
                    capture: &capture,
                    entry: &entry,
                    words,
                    waits: probe.actions.wait_for_room,
                };
                let followed = Arc::new(follow(detours, pool.limit(), &exit, around, mem)?);
                calls = Some(Arc::clone(&followed));
                Some((entry, followed))
            }
        };
        let (actions, counters) = (Arc::clone(&probe.actions), Arc::clone(&probe.counters));
        let what = What {
            at,
            number,
            capture: capture.clone(),
            followed,
        };
        Ok(RecordSource::new(
            id, what, actions, counters, words, tallies,
        )?)
    };
    let source = match make() {
        Ok(source) => Arc::new(source),
        // Release everything, because the caller may try again and again.
        Err(why) => {
            detours.release_counters(words);
            if let Some(calls) = calls {
                release_calls(detours, &calls, mem);
            }
            return Err(why);
        }
    };
    code.sources.add(Arc::clone(&source));
    Ok(source)
}

/// Returns the enabled return probes of `site` if the calls of all of them need an exit at the entry only;
/// otherwise none. Within one frame, calls that return through the trampoline and calls that return through stubs
/// would conflict.
fn returning_without_exit<'s>(
    site: &'s SiteState,
    probes: &'s Probes,
    switches: Switches,
) -> impl Iterator<Item = ProbeId> + 's {
    let returning = || {
        let members = probes.enabled(&site.members);
        members.filter(|(_, probe)| probe.pool.is_some())
    };
    let can_be = |probe: &Probe| {
        let actions = &probe.actions;
        probe.spec.budget.is_none()
            && actions.capture.is_empty()
            && unfollowable(&probe.spec, &probe.actions).is_none()
    };
    let possible = switches.optimize && returning().all(|(_, probe)| can_be(probe));
    returning().filter(move |_| possible).map(|(id, _)| id)
}

/// Returns the return probes, with their sites, for which stubs have to be made without a detour. A detour comes
/// with stubs.
pub(crate) fn wanted_stubs(rules: &Rules<'_>, sources: &RecordSources) -> Vec<(Gva, ProbeId)> {
    let mut wanted = Vec::new();
    for (at, site) in rules.sites {
        let missing = returning_without_exit(site, rules.probes, rules.switches);
        let missing = missing.filter(|id| sources.get(*id).is_none());
        let before = wanted.len();
        wanted.extend(missing.map(|id| (*at, id)));
        let is_for_jump = || rules.fit(site).is_ok();
        if wanted.len() > before && (site.gone || !rules.is_wanted(site) || is_for_jump()) {
            wanted.truncate(before);
        }
    }
    wanted
}

/// Makes the `wanted` stubs. The calls of a probe for which there is no room return through the trampoline.
pub(crate) fn make_stubs(
    wanted: &[(Gva, ProbeId)],
    probes: &Probes,
    code: &mut OurCode,
    around: &DetourContext,
    mem: &dyn PhysMemory,
) {
    for (at, id) in wanted {
        if let Err(why) = source(*id, *at, probes, code, around, mem) {
            debug!(%at, %why, "a return takes an exit");
        }
    }
}

/// Returns the sources of the return probes at `site` if the returns of all of them need no exit; otherwise none.
pub(crate) fn stubs(
    site: &SiteState,
    probes: &Probes,
    switches: Switches,
    sources: &RecordSources,
) -> BTreeMap<ProbeId, Arc<RecordSource>> {
    let ids = returning_without_exit(site, probes, switches);
    let sources = ids.map(|id| Some((id, sources.get(id)?)));
    sources.collect::<Option<_>>().unwrap_or_default()
}

/// Notes in each of the `sources` whether its probe is enabled. The virtual CPUs must be stopped.
pub(crate) fn settle_sources(sources: &RecordSources, probes: &Probes, switches: Switches) {
    for source in sources.iter() {
        source.set_enabled(switches.armed && probes.is_enabled(source.probe));
    }
}

/// Parameters of the code that runs at the returns of a probe.
struct Leaving<'a> {
    source: u32,
    capture: &'a Capture,
    entry: &'a EntryCapture,
    words: CounterPlace,
    waits: bool,
}

/// Makes `count` instances and the stubs that their calls return to.
fn follow(
    detours: &mut Detours,
    count: u32,
    leaving: &Leaving<'_>,
    around: &DetourContext,
    mem: &dyn PhysMemory,
) -> Result<Followed, Unoptimized> {
    let layout = InstanceLayout::new(leaving.entry)?;
    let (bytes, first) = layout.initial(count, detours.next_generation());
    let stride = layout.stride() as u64;
    let room = detours.take_instances(mem, &bytes, stride);
    let (at, gpa) = room.ok_or(Unoptimized::NoRoom)?;
    let free = leaving.words.free();
    let instances = Instances { at, count, free };
    let code = |first_stub| {
        let exit = Exit {
            source: leaving.source,
            capture: leaving.capture,
            instances: &instances,
            entry: leaving.entry,
            lost: leaving.words.lost(),
            waits: leaving.waits,
            first_stub,
        };
        ReturnCode::new(&around.ring, &exit).map_err(Unoptimized::from)
    };
    // The length does not depend on the numbers of the stubs.
    let made = code(0).and_then(|measured| {
        let code_len = measured.code().len() as u64;
        let stubs = detours.take(code_len, aligned(u64::from(STUB)));
        let stubs = stubs.ok_or(Unoptimized::NoRoom)?;
        let number = detours.stub_number(stubs).ok_or(Unoptimized::NoRoom);
        let filled = number.and_then(code).and_then(|code| {
            let filled = detours.fill(mem, stubs, code.code());
            Ok(filled?)
        });
        let filled = filled.and_then(|()| {
            let free = detours.word(free).ok_or(Unoptimized::NoRoom)?;
            mem.write_u64(free, first).map_err(HiddenError::from)?;
            Ok(free)
        });
        if filled.is_err() {
            detours.release(mem, stubs, code_len);
        }
        let free = filled?;
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
        detours.release_instances(at, bytes.len() as u64);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_recorded_whichever_registers_are_shown() {
        let set = |registers: &[Gpr]| RegisterSet::from_iter(registers.iter().copied());
        let rdi = set(&[Gpr::Rdi]);
        assert_eq!(recorded(rdi, true), set(&[Gpr::Rdi, Gpr::Rax]));
        assert_eq!(recorded(set(&[]), true), set(&[Gpr::Rax]));
        assert_eq!(recorded(rdi, false), rdi);
        let all = RegisterSet::default();
        assert_eq!([recorded(all, true), recorded(all, false)], [all, all]);
    }
}
