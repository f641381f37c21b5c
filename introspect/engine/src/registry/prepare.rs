//! Makes the detours that sites want, before a stop and while the guest runs.
//!
//! Invariants: a detour is written before any task can reach it and never changed; a detour that was in use
//! stays unchanged as a *ghost* until no task can reach it and there is no room. The same members at the same
//! site reclaim it.

use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Member, Recorder, TaskFields};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::image::TaskLayout;
use hvprobe_spec::ProbeId;
use tracing::debug;

use crate::code::jump::{DetourContext, Jump};
use crate::guest::per_cpu::per_cpu;
use crate::registry::live::Live;
use crate::registry::state::Registry;
use crate::unoptimized::Unoptimized;

fn task_fields(layout: TaskLayout) -> Option<TaskFields> {
    Some(TaskFields {
        current: per_cpu(layout.current_task)?,
        pid: i32::try_from(layout.pid).ok()?,
        tgid: i32::try_from(layout.tgid).ok()?,
        comm: i32::try_from(layout.comm).ok()?,
    })
}

impl Registry {
    /// Makes the detours that sites want and do not have yet. No task can reach them before the text is
    /// changed, so the guest may run meanwhile.
    pub(crate) fn prepare_jumps(&mut self, mem: &dyn PhysMemory) -> Vec<(Gva, Jump)> {
        let mut wanted = Vec::new();
        let rules = self.rules();
        for (at, site) in rules.sites {
            if site.gone || !rules.is_wanted(site) || rules.fit(site).is_err() {
                continue;
            }
            let members = rules.probes.enabled(&site.members).map(|(id, _)| id);
            let members: Vec<ProbeId> = members.collect();
            if site.jump().is_none_or(|jump| jump.members != members) {
                wanted.push((*at, members));
            }
        }
        let stubs = self.wanted_stubs();
        if wanted.is_empty() && stubs.is_empty() {
            return Vec::new();
        }
        let around = self.reserve_detours(mem);
        if let Ok(around) = &around {
            self.make_stubs(&stubs, around, mem);
        }
        let mut prepared = Vec::with_capacity(wanted.len());
        for (at, members) in wanted {
            let jump = match &around {
                Ok(around) => self.make_jump(at, members, around, mem),
                Err(why) => Err(why.clone()),
            };
            let Some(site) = self.sites.get_mut(&at) else {
                continue;
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

    fn reserve_detours(&mut self, mem: &dyn PhysMemory) -> Result<DetourContext, Unoptimized> {
        let (Some(live), Some(detours)) = (&self.live, &mut self.code.region.detours) else {
            return Err(Unoptimized::NoRoom);
        };
        let Live { view, .. } = live;
        let cpu = match view.cpu_number {
            Some(at) => Some(per_cpu(at).ok_or(Unoptimized::NoPerCpu)?),
            None if self.vcpus == 1 => None,
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

    fn make_jump(
        &mut self,
        at: Gva,
        members: Vec<ProbeId>,
        around: &DetourContext,
        mem: &dyn PhysMemory,
    ) -> Result<Jump, Unoptimized> {
        if let Some(ghosts) = self.code.ghost_jumps.get_mut(&at)
            && let Some(jump) = ghosts.extract_if(.., |jump| jump.members == members).next()
        {
            return Ok(jump);
        }
        let mut sources = Vec::with_capacity(members.len());
        for id in &members {
            sources.push(self.source(*id, at, around, mem)?);
        }
        let recorders: Vec<Member<'_>> = sources
            .iter()
            .map(|source| Member {
                conditions: &source.actions.when,
                vetoed: source.words.vetoed(),
                part: source.part(),
            })
            .collect();
        let site = self.sites.get(&at).ok_or(Unoptimized::NoRoom)?;
        let span = site.point.span.as_ref().map_err(Clone::clone)?;
        let recorder = Recorder::new(span, &around.ring, &recorders)?;
        let size = recorder.size() as u64;
        let detours = self
            .code
            .region
            .detours
            .as_mut()
            .ok_or(Unoptimized::NoRoom)?;
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
}
