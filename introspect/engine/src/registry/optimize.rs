//! Which sites carry a jump to a detour instead of an int3, and the detours themselves.
//!
//! ```text
//!              fit, prepared before a stop              a member or neighbour comes or goes,
//!   breakpoint ───────────────────────────► jump ──────► the switch changes ──► breakpoint
//!                                                        └─ still fit ──► jump with a new detour
//! ```
//! Invariants: a site has a jump only while every enabled member is served by a record in the ring, and no
//! other site lies under the jump's bytes; a detour is written before any task can reach it and never changed;
//! a detour that was in use stays unchanged as a *ghost*, for the same members at the same site, until there is
//! no room and no word of guest memory points into it.

use std::ops::Bound;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Member, Recorder, Span, StackFields, TaskFields};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::image::{KernelImage, TaskLayout};
use hvprobe_spec::{Actions, Item, Mechanism, ProbeId, ProbeSpec, Then};
use tracing::debug;

use crate::code::jump::{DetourContext, Jump};
use crate::guest::per_cpu::per_cpu;
use crate::registry::guest_kprobes::PREPARES;
use crate::registry::state::{Live, Registry};
use crate::sites::site::{Patch, Probe, SiteState};
use crate::unoptimized::Unoptimized;

/// Action that needs an exit where detours cannot copy the stack for the host to unwind later.
pub(crate) const STACKS: &str = "records the kernel's stack";
/// The same action while calls in flight return to addresses other than those on the stack, which are not known
/// later.
const STACKS_OF_CALLS: &str = "records the kernel's stack while there are return probes";

/// Abilities of detours, besides recording registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Abilities {
    /// Whether they can read memory.
    pub(crate) read: bool,
    /// Whether they can copy stacks; if not, the action that needs an exit.
    pub(crate) stacks: Result<(), &'static str>,
}

/// Returns the reason why hits of the probe `spec` with these actions need an exit, with detours that have the
/// abilities `can`; `None` if they need none.
pub(crate) fn needs_exit(
    spec: &ProbeSpec,
    actions: &Actions,
    can: impl Fn() -> Abilities,
) -> Option<&'static str> {
    if spec.mechanism.is_some_and(|it| it > Mechanism::Optimized) {
        Some("asks for an exit")
    } else if spec.budget.is_some() {
        Some("has a budget")
    } else if spec.is_return() {
        unfollowable(spec, actions)
    } else {
        synchronous(actions, can)
    }
}

/// Returns the reason why the calls of a return probe cannot be followed without exits; `None` if they can.
pub(crate) fn unfollowable(spec: &ProbeSpec, actions: &Actions) -> Option<&'static str> {
    const NOTHING: Abilities = Abilities {
        read: false,
        stacks: Err(STACKS),
    };
    if spec.maxactive_auto {
        Some("adds instances as calls need them")
    } else if actions.record_stacks() {
        Some(STACKS)
    } else if !actions.capture_at_return.is_empty() {
        Some("reads memory when the function returns")
    } else {
        synchronous(actions, || NOTHING)
    }
}

/// Returns the reason why hits with these actions cannot be recorded without an exit, with detours that have
/// the abilities `can`; `None` if they can.
fn synchronous(actions: &Actions, can: impl Fn() -> Abilities) -> Option<&'static str> {
    let reads = actions.capture.iter().any(Item::reaches_memory);
    if actions.post {
        Some("has a post-handler")
    } else if actions.hold.is_some() {
        Some("holds the virtual CPU")
    } else if actions.then != Then::Proceed {
        Some("changes the execution path")
    } else if !actions.changes.is_empty() {
        Some("changes registers or memory")
    } else if actions.faults {
        Some("reports faults")
    } else if actions.record_stacks()
        && let Err(why) = can().stacks
    {
        Some(why)
    } else if reads && !can().read {
        Some("reads memory that may not be there")
    } else {
        None
    }
}

/// Returns the location of the stacks of tasks with this layout, if it is known.
pub(crate) fn stack_fields(image: &KernelImage, task: Option<TaskLayout>) -> Option<StackFields> {
    let stack = image.member_offset("task_struct", "stack").ok()?;
    Some(StackFields {
        current: per_cpu(task?.current_task)?,
        stack: i32::try_from(stack).ok()?,
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

impl Registry {
    /// Returns the span that a jump at `site` would displace.
    ///
    /// # Errors
    /// Why the site must have an int3.
    pub(crate) fn fit<'s>(&self, site: &'s SiteState) -> Result<&'s Span, Unoptimized> {
        #[cfg(test)]
        hvprobe_fixtures::count_work();
        if !self.switches.optimize {
            return Err(Unoptimized::Off);
        }
        if site.internal.is_some() {
            return Err(Unoptimized::Internal);
        }
        if let Some(why) = self.synchronous(self.probes.enabled(&site.members)) {
            return Err(why);
        }
        let span = site.point.span.as_ref().map_err(Clone::clone)?;
        if span.needs_quiescence() && !self.can_scan {
            return Err(Unoptimized::Unscannable);
        }
        self.kprobes
            .allow(span, !self.hooks.unhooked.contains(PREPARES))?;
        let behind = (Bound::Excluded(span.at()), Bound::Excluded(span.end()));
        let mut others = self.sites.range(behind);
        if let Some((at, _)) = others.find(|(_, other)| self.is_wanted(other)) {
            return Err(Unoptimized::Neighbour { at: *at });
        }
        Ok(span)
    }

    /// Returns why the first of `probes` that needs an exit needs one.
    pub(crate) fn synchronous<'s>(
        &self,
        mut probes: impl Iterator<Item = (ProbeId, &'s Probe)>,
    ) -> Option<Unoptimized> {
        probes.find_map(|(probe, Probe { spec, actions, .. })| {
            let what = needs_exit(spec, actions, || self.abilities())?;
            Some(Unoptimized::Synchronous { probe, what })
        })
    }

    fn abilities(&self) -> Abilities {
        let is_known = self.live.as_ref().is_some_and(|live| live.stack.is_some());
        let stacks = match (is_known, self.probes.follow_calls()) {
            (false, _) => Err(STACKS),
            (true, true) => Err(STACKS_OF_CALLS),
            (true, false) => Ok(()),
        };
        Abilities {
            read: self.can_read_in_detours(),
            stacks,
        }
    }

    /// Returns whether detours can read memory. They call functions of the kernel for that, which must not be
    /// probed, because the calls would be hits.
    pub(crate) fn can_read_in_detours(&self) -> bool {
        let readers = self
            .live
            .as_ref()
            .and_then(|live| live.readers.as_ref().ok());
        readers.is_some_and(|readers| {
            let mut code = readers.code.iter().cloned();
            !code.any(|code| self.sites.range(code).any(|(_, site)| self.is_wanted(site)))
        })
    }

    /// Returns why the armed `site` has an int3 instead of a jump; `None` if it has no int3.
    pub(crate) fn unoptimized(&self, site: &SiteState) -> Option<Unoptimized> {
        matches!(site.patch, Patch::Breakpoint).then(|| self.without_jump(site))
    }

    /// Returns why `site` has no jump.
    pub(crate) fn without_jump(&self, site: &SiteState) -> Unoptimized {
        match self.fit(site) {
            Err(why) => why,
            Ok(_) => site.unprepared.clone().unwrap_or(Unoptimized::NoRoom),
        }
    }

    /// Makes the detours that sites want and do not have yet. No task can reach them before the text is
    /// changed, so the guest may run meanwhile.
    pub(crate) fn prepare_jumps(&mut self, mem: &dyn PhysMemory) -> Vec<(Gva, Jump)> {
        let mut wanted = Vec::new();
        for (at, site) in &self.sites {
            if site.gone || !self.is_wanted(site) || self.fit(site).is_err() {
                continue;
            }
            let members = self.probes.enabled(&site.members).map(|(id, _)| id);
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

    /// Returns whether the jump of `site` can stay as it is.
    pub(crate) fn keeps_jump(&self, site: &SiteState) -> bool {
        let members = self.probes.enabled(&site.members).map(|(id, _)| id);
        site.jump()
            .is_some_and(|jump| jump.members.iter().copied().eq(members))
            && self.fit(site).is_ok()
    }
}
