//! Makes the detours that sites want, before a stop and while the guest runs.
//!
//! Invariants: a detour is written before any task can reach it and never changed; a detour that was in use stays
//! unchanged as a *ghost* until no task can reach it and its room is needed. The same members at the same site
//! reclaim it.

use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Member, Recorder, TaskFields};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_hit::record::RecordSources;
use hvprobe_linux::image::TaskLayout;
use hvprobe_spec::ProbeId;
use tracing::debug;

use crate::code::jump::{DetourContext, Jump};
use crate::code::ours::OurCode;
use crate::guest::per_cpu::per_cpu;
use crate::registry::live::Live;
use crate::registry::optimize::Rules;
use crate::registry::recorders::{make_stubs, source, wanted_stubs};
use crate::sites::probes::Probes;
use crate::sites::site::{SiteState, Sites};
use crate::unoptimized::Unoptimized;

/// What sites want and do not have yet.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// The sites that want a jump to another detour, and the members that the detour is to record for.
    jumps: Vec<(Gva, Vec<ProbeId>)>,
    /// The sites, with their return probes, that want stubs without a detour.
    stubs: Vec<(Gva, ProbeId)>,
}

impl Wanted {
    /// Finds out what the sites in `rules` want and do not have yet. `sources` are the existing record sources,
    /// with their stubs.
    pub(crate) fn of(rules: &Rules<'_>, sources: &RecordSources) -> Self {
        let mut jumps = Vec::new();
        for (at, site) in rules.sites {
            if site.gone || !rules.is_wanted(site) || rules.fit(site).is_err() {
                continue;
            }
            let members = rules.probes.enabled(&site.members).map(|(id, _)| id);
            let members: Vec<ProbeId> = members.collect();
            if site.jump().is_none_or(|jump| jump.members != members) {
                jumps.push((*at, members));
            }
        }
        let stubs = wanted_stubs(rules, sources);
        Self { jumps, stubs }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.jumps.is_empty() && self.stubs.is_empty()
    }

    /// Makes the detours and stubs. Returns the jumps to the detours. No task can reach them before the text is
    /// changed, so the guest may run meanwhile. If no detour can be made for a site, notes the reason there.
    pub(crate) fn make(
        self,
        around: &Result<DetourContext, Unoptimized>,
        probes: &Probes,
        sites: &mut Sites,
        code: &mut OurCode,
        mem: &dyn PhysMemory,
    ) -> Vec<(Gva, Jump)> {
        if let Ok(around) = around {
            make_stubs(&self.stubs, probes, code, around, mem);
        }
        let mut prepared = Vec::with_capacity(self.jumps.len());
        for (at, members) in self.jumps {
            let Some(site) = sites.get_mut(&at) else {
                continue;
            };
            let jump = match around {
                Ok(around) => make_jump(site, members, probes, code, around, mem),
                Err(why) => Err(why.clone()),
            };
            site.unprepared = match jump {
                Ok(jump) => {
                    prepared.push((at, jump));
                    None
                }
                Err(why) => {
                    debug!(%at, %why, "a probepoint keeps its int3");
                    Some(why)
                }
            };
        }
        prepared
    }
}

/// Reserves addresses for detours in `code`. Returns the facts about the guest that detours depend on. `vcpus` is
/// the number of its virtual CPUs.
pub(crate) fn reserve_detours(
    live: &Live,
    vcpus: usize,
    code: &mut OurCode,
    mem: &dyn PhysMemory,
) -> Result<DetourContext, Unoptimized> {
    let Some(detours) = &mut code.region.detours else {
        return Err(Unoptimized::NoRoom);
    };
    let view = &live.view;
    let cpu = match view.cpu_number {
        Some(at) => Some(per_cpu(at).ok_or(Unoptimized::NoPerCpu)?),
        None if vcpus == 1 => None,
        None => return Err(Unoptimized::NoPerCpu),
    };
    let task = view
        .task
        .ok()
        .map(|layout| task_fields(layout).ok_or(Unoptimized::NoPerCpu));
    Ok(DetourContext {
        ring: detours.reserve(mem, &view.tables)?,
        cpu,
        task: task.transpose()?,
        readers: live.readers.as_ref().ok().map(|found| found.readers),
        stack: live.stack,
    })
}

fn task_fields(layout: TaskLayout) -> Option<TaskFields> {
    Some(TaskFields {
        current: per_cpu(layout.current_task)?,
        pid: i32::try_from(layout.pid).ok()?,
        tgid: i32::try_from(layout.tgid).ok()?,
        comm: i32::try_from(layout.comm).ok()?,
    })
}

/// Makes a jump at `site` whose detour records for `members`, or reclaims a ghost.
fn make_jump(
    site: &SiteState,
    members: Vec<ProbeId>,
    probes: &Probes,
    code: &mut OurCode,
    around: &DetourContext,
    mem: &dyn PhysMemory,
) -> Result<Jump, Unoptimized> {
    let at = site.point.displaced.at();
    if let Some(jump) = code.reclaim_jump(at, &members) {
        return Ok(jump);
    }
    let mut sources = Vec::with_capacity(members.len());
    for id in &members {
        sources.push(source(*id, at, probes, code, around, mem)?);
    }
    let recorders: Vec<Member<'_>> = sources
        .iter()
        .map(|source| Member {
            conditions: &source.actions.when,
            vetoed: source.words.vetoed(),
            part: source.part(),
        })
        .collect();
    let span = site.point.span.as_ref().map_err(Clone::clone)?;
    let recorder = Recorder::new(span, &around.ring, &recorders)?;
    let size = recorder.size() as u64;
    let detours = code.region.detours.as_mut().ok_or(Unoptimized::NoRoom)?;
    let place = |first: Gva, last: Gva| span.targets(first..last.wrapping_add(1)).next();
    let to = detours.take(size, place).ok_or(Unoptimized::NoRoom)?;
    let made = recorder
        .place(to)
        .map_err(Unoptimized::from)
        .and_then(|detour| {
            detours.fill(mem, to, detour.code())?;
            let detour = Arc::new(detour);
            Ok(Jump { detour, members })
        });
    if made.is_err() {
        detours.release(mem, to, size);
    }
    made
}
