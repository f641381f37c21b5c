//! Which sites carry an int3, and which a jump to a detour instead.
//!
//! ```text
//!              fit, prepared before a stop              a member or neighbour comes or goes,
//!   breakpoint ───────────────────────────► jump ──────► the switch changes ──► breakpoint
//!                                                        └─ still fit ──► jump with a new detour
//! ```
//! Invariants: a site has a jump only while every enabled member is served by a record in the ring, and no
//! other site lies under the jump's bytes; nothing here changes anything.

use std::ops::Bound;

use hvprobe_arch::detour::{Span, StackFields};
use hvprobe_linux::image::{KernelImage, TaskLayout};
use hvprobe_spec::{Actions, Item, Mechanism, ProbeId, ProbeSpec, Then};

use crate::code::jump::Jump;
use crate::guest::kprobes::{GuestKprobes, PREPARES};
use crate::guest::per_cpu::per_cpu;
use crate::registry::hook_state::{Hooks, Patches};
use crate::registry::live::Live;
use crate::registry::switches::Switches;
use crate::sites::probes::Probes;
use crate::sites::site::{Patch, Probe, SiteState, Sites};
use crate::unoptimized::Unoptimized;

/// Action that needs an exit where detours cannot copy the stack for the host to unwind later.
pub(crate) const STACKS: &str = "records the kernel's stack";
/// The same action while there are return probes: calls in flight have addresses of ours on the stack, and their
/// real return addresses are not known later.
const STACKS_OF_CALLS: &str = "records the kernel's stack while there are return probes";

/// Abilities of detours, besides recording registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Abilities {
    /// Whether they can read memory.
    pub(crate) read: bool,
    /// Whether they can copy stacks; if not, the action that needs an exit.
    pub(crate) stacks: Result<(), &'static str>,
}

/// Returns the reason why hits of the probe `spec` with these actions need an exit; `None` if they need none. `can`
/// returns the abilities of detours.
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

/// Returns the reason why hits with these actions cannot be recorded without an exit; `None` if they can. `can`
/// returns the abilities of detours.
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

/// The facts that decide whether a site gets an int3, a jump or no patch, and which mechanism is shown for its
/// probes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules<'a> {
    pub(crate) switches: Switches,
    pub(crate) probes: &'a Probes,
    pub(crate) sites: &'a Sites,
    pub(crate) hooks: &'a Hooks,
    pub(crate) kprobes: &'a GuestKprobes,
    pub(crate) live: Option<&'a Live>,
    /// Whether the guest has little enough memory for looks.
    pub(crate) can_scan: bool,
    /// Whether there is memory for detours.
    pub(crate) has_detours: bool,
}

impl Rules<'_> {
    /// Returns whether `site` is to hold an int3 or a jump.
    pub(crate) fn is_wanted(&self, site: &SiteState) -> bool {
        let patches = self.hooks.ftrace.patches != Patches::No;
        let left_to_ftrace = site.occupied || site.point.ftrace && patches;
        self.switches.armed
            && !left_to_ftrace
            && (site.internal.is_some() || self.probes.any_enabled(&site.members))
    }

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

    /// Finds the first of `probes` that needs an exit. Returns the reason; `None` if no probe needs one.
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
        let is_known = self.live.is_some_and(|live| live.stack.is_some());
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

    /// Returns whether detours can read memory. To do so, they call functions of the kernel. These functions must
    /// not be probed, because the calls would be hits.
    pub(crate) fn can_read_in_detours(&self) -> bool {
        let readers = self.live.and_then(|live| live.readers.as_ref().ok());
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

    /// Returns whether `jump` records for the enabled members of `site`, and `site` can have a jump.
    pub(crate) fn suits(&self, site: &SiteState, jump: &Jump) -> bool {
        let members = self.probes.enabled(&site.members).map(|(id, _)| id);
        jump.members.iter().copied().eq(members) && self.fit(site).is_ok()
    }

    /// Returns whether the jump of `site` can stay as it is.
    pub(crate) fn keeps_jump(&self, site: &SiteState) -> bool {
        site.jump().is_some_and(|jump| self.suits(site, jump))
    }
}
