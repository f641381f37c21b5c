//! Which sites carry a jump to a detour instead of an int3, and the detours themselves.
//!
//! ```text
//!              fit, prepared before a stop              a member or neighbour comes or goes,
//!   breakpoint ───────────────────────────► jump ──────► the switch is turned ──► breakpoint
//!                                                        └─ still fit ──► jump with a new detour
//! ```
//! Invariants: a jump is there only while every enabled member of its site is served by a record in
//! the ring, and no other site lies under its bytes; a detour is written before anybody can come to
//! it and never changed; one that was in use stays as it is (a *ghost*), for the same members at the
//! same site, until there is no room and no word of guest memory points into it.

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

/// What needs an exit where no detour can copy the stack for the host to follow it later.
pub(crate) const STACKS: &str = "records the kernel's stack";
/// The same, where calls return elsewhere than to what is on the stack, and nobody knows later where to.
const STACKS_OF_CALLS: &str = "records the kernel's stack while there are return probes";

/// What detours can do, beside recording what registers hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Abilities {
    /// Read memory.
    pub(crate) read: bool,
    /// Copy stacks; if not, what of a probe needs an exit.
    pub(crate) stacks: Result<(), &'static str>,
}

/// Whether hits of the probe `spec` with these actions can be told without an exit, by detours that `can` do so
/// much; if they cannot, what needs one.
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

/// Whether the calls of a return probe can be followed without exits; if not, what needs one.
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

/// Whether a probe's hits can be recorded without an exit, by detours that `can` do so much; if they cannot,
/// what needs one.
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

/// Where the stack of a task is in a kernel whose tasks are found so, if that can be told.
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
    /// The span that a jump at `site` would displace.
    ///
    /// # Errors
    /// Why the site is to have an int3.
    pub(crate) fn fit<'s>(&self, site: &'s SiteState) -> Result<&'s Span, Unoptimized> {
        #[cfg(test)]
        hvprobe_fixtures::count_work();
        if !self.switches.optimize {
            return Err(Unoptimized::Off);
        }
        if site.internal.is_some() {
            return Err(Unoptimized::Internal);
        }
        if let Some(why) = self.synchronous(self.enabled_members(site)) {
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

    /// Why the first of `probes` that cannot do without an exit needs one.
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

    /// Whether detours can read memory: by code of the kernel, which is not probed itself, as their own
    /// calls of it would be hits.
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

    pub(crate) fn enabled_members<'s>(
        &'s self,
        site: &'s SiteState,
    ) -> impl Iterator<Item = (ProbeId, &'s Probe)> {
        let ids = site.members.iter().copied();
        ids.filter(|id| self.is_enabled(*id))
            .filter_map(|id| Some((id, self.probes.get(id)?)))
    }

    /// Why `site` carries an int3 although it is armed; `None` for one that does not.
    pub(crate) fn unoptimized(&self, site: &SiteState) -> Option<Unoptimized> {
        matches!(site.patch, Patch::Breakpoint).then(|| self.without_jump(site))
    }

    /// Why `site` has no jump.
    pub(crate) fn without_jump(&self, site: &SiteState) -> Unoptimized {
        match self.fit(site) {
            Err(why) => why,
            Ok(_) => site.unprepared.clone().unwrap_or(Unoptimized::NoRoom),
        }
    }

    /// Makes the detours that sites want and do not have yet. Nobody can
    /// come to them before the text is changed, so the guest may run meanwhile.
    pub(crate) fn prepare_jumps(&mut self, mem: &dyn PhysMemory) -> Vec<(Gva, Jump)> {
        let mut wanted = Vec::new();
        for (at, site) in &self.sites {
            if site.gone || !self.is_wanted(site) || self.fit(site).is_err() {
                continue;
            }
            let members = self.enabled_members(site).map(|(id, _)| id);
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
            detours.give_back(mem, to, size);
        }
        made
    }

    /// Whether the jump of `site` can stay as it is.
    pub(crate) fn keeps_jump(&self, site: &SiteState) -> bool {
        let members = self.enabled_members(site).map(|(id, _)| id);
        site.jump()
            .is_some_and(|jump| jump.members.iter().copied().eq(members))
            && self.fit(site).is_ok()
    }
}
