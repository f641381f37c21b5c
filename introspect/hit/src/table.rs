//! The probe table: what the virtual CPUs look hits up in.
//!
//! Invariant: a table never changes once built. The control side builds a new one for every
//! change and hands it over while the virtual CPUs are stopped, so looking up takes no lock.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Detour, JUMP};
use hvprobe_arch::insn::{Displaced, SLOT_SIZE, SlotCode, SlotKind};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::unwind::Unwinder;
use hvprobe_spec::{Actions, ProbeId};
use rustc_hash::{FxHashMap, FxHashSet};

use super::counters::Counters;
use super::vacated::Vacated;
use crate::calls::{Calls, Found, Pool};
use crate::record::{NESTED_MAX, RecordSource, Stubs};
use crate::region::{Fixtures, KERNEL_WINDOW};

/// What the engine itself wants of a hit, for all of its hooks at one function together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Internal {
    /// The current task is about to run for the last time: its calls in flight are orphans.
    pub task_dead: bool,
    /// A task that has run for the last time, the function's first argument, is freed: so are the calls
    /// that it made since.
    pub task_freed: bool,
    /// The guest's kernel has faulted; the function's first argument leads to the registers.
    pub fault: bool,
    /// The hooks whose events the engine is told of while the virtual CPU waits.
    pub told: HookSet,
}

/// A set of the engine's hooks, by their numbers in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookSet(pub u32);

impl HookSet {
    /// Whether it has none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl Internal {
    /// The id of the engine's own member: before all probes of a site, none of which can keep the
    /// hit from it.
    pub const ID: ProbeId = ProbeId(0);

    /// What both want.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            task_dead: self.task_dead || other.task_dead,
            task_freed: self.task_freed || other.task_freed,
            fault: self.fault || other.fault,
            told: HookSet(self.told.0 | other.told.0),
        }
    }

    /// Whether the virtual CPU waits there.
    #[must_use]
    pub fn holds(&self) -> bool {
        !self.told.is_empty()
    }
}

/// What a member does at a hit.
#[derive(Debug)]
pub enum Role {
    /// A kprobe.
    Probe(Arc<Actions>),
    /// The entry of a return probe.
    Return {
        /// What happens at the entry and at the return.
        actions: Arc<Actions>,
        /// How its calls are followed.
        calls: Following,
    },
    /// The engine's own.
    Internal(Internal),
}

/// How the calls are followed that an exit has seen the entry of.
#[derive(Debug)]
pub enum Following {
    /// They return through the trampoline, with another exit.
    Trampoline(Arc<Pool>),
    /// They return to code that records it, as those that a detour has seen the entry of.
    Stubs(Arc<RecordSource>),
}

/// One probe at a probepoint.
#[derive(Debug)]
pub struct Member {
    /// The probe; [`Internal::ID`] for the engine's own.
    pub id: ProbeId,
    /// What it counts.
    pub counters: Arc<Counters>,
    /// What it does.
    pub role: Role,
}

/// A probepoint: how its instruction takes effect, and the enabled probes there, in the order of
/// their registration.
#[derive(Debug)]
pub struct Site {
    /// The instruction that was there.
    pub displaced: Displaced,
    /// The out-of-line copy; `None` when the instruction is emulated.
    pub slot: Option<SlotCode>,
    /// Where the jump that is there instead of an int3 leads.
    pub detour: Option<Arc<Detour>>,
    /// The instruction before it may be `sti`.
    pub after_sti: bool,
    /// The probes.
    pub members: Box<[Member]>,
    /// Whether one of them has a post-handler.
    pub posts: bool,
}

/// A return probe, as its returns need it.
#[derive(Debug)]
pub struct Returning {
    /// What it counts.
    pub counters: Arc<Counters>,
    /// What happens at a return.
    pub actions: Arc<Actions>,
    /// Disabled: calls that were entered before only go back to their callers.
    pub disabled: bool,
}

/// What all virtual CPUs share for return probes.
#[derive(Debug)]
pub struct Returns {
    /// The calls in flight that return through the trampoline.
    pub calls: Calls,
    /// Returns through the trampoline that no call was known for.
    pub unmatched: AtomicU64,
    /// Numbers the calls.
    pub next_call: AtomicU64,
}

/// An immutable set of armed probepoints.
#[derive(Debug, Default)]
pub struct ProbeTable {
    by_address: FxHashMap<u64, u32>,
    /// Their slots, by where they begin.
    by_slot: FxHashMap<u64, u32>,
    /// The sites of detours, by the int3 with which they ask for an exit.
    by_escape: FxHashMap<u64, u32>,
    /// Where to go on from the int3s in the bytes of jumps, and from those of detours that have no
    /// site any more.
    inside_jumps: FxHashMap<u64, Gva>,
    sites: Vec<Site>,
    /// Addresses that carried one of our int3s once: a virtual CPU may still be on its way to the
    /// #BP entry with one of them in its exception frame.
    retired: Arc<FxHashSet<u64>>,
    fixtures: Option<Fixtures>,
    returning: FxHashMap<ProbeId, Returning>,
    returns: Option<Arc<Returns>>,
    vacated: Arc<Vacated>,
    /// The return probes that follow calls without exits.
    followed: Stubs,
    ask_all: Vec<Range<Gva>>,
    unwinder: Option<Unwinder>,
    /// Whether an instruction is stepped.
    steps: bool,
    /// Whether handlers reach for memory that may be the process's.
    reaches_process: bool,
    /// Whether hits wait for room.
    waits_for_room: bool,
}

/// What a table is made of.
#[derive(Debug)]
pub struct Parts {
    /// Armed sites.
    pub sites: Vec<Site>,
    /// Addresses that carried one of our int3s once.
    pub retired: Arc<FxHashSet<u64>>,
    /// The fixed places of the hidden region, while it is mapped.
    pub fixtures: Option<Fixtures>,
    /// The return probes.
    pub returning: FxHashMap<ProbeId, Returning>,
    /// What they share.
    pub returns: Arc<Returns>,
    /// Frames that have their return addresses back.
    pub vacated: Arc<Vacated>,
    /// The return probes that follow calls without exits.
    pub followed: Vec<Arc<RecordSource>>,
    /// Return addresses that say that not all of a task's calls can be found on its stack: behind the beginning of
    /// each, and as far as its end.
    pub ask_all: Vec<Range<Gva>>,
    /// The int3s of detours without a site, and where to go on from each.
    pub ghosts: Vec<(Gva, Gva)>,
    /// What follows stacks, if the kernel has tables for that.
    pub unwinder: Option<Unwinder>,
}

impl ProbeTable {
    /// A table of these parts.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let by_address = parts
            .sites
            .iter()
            .zip(0..)
            .map(|(site, index)| (site.displaced.at().0, index))
            .collect();
        let sites = parts.sites;
        let by_slot = sites
            .iter()
            .zip(0..)
            .filter_map(|(site, index)| Some((site.slot.as_ref()?.at().0, index)))
            .collect();
        let detours = || {
            let sites = sites.iter().zip(0..);
            sites.filter_map(|(site, index)| Some((site.detour.as_ref()?, index)))
        };
        let trapped = |slot: &SlotCode| slot.kind() == SlotKind::Trapped;
        let steps = sites
            .iter()
            .any(|site| site.slot.as_ref().is_some_and(trapped));
        let roles = || sites.iter().flat_map(|site| &site.members);
        let actions = roles().filter_map(|member| match &member.role {
            Role::Probe(actions) | Role::Return { actions, .. } => Some(actions),
            Role::Internal(_) => None,
        });
        let at_return = parts.returning.values().map(|returning| &returning.actions);
        let (mut reaches_process, mut waits_for_room) = (false, false);
        for actions in actions.chain(at_return) {
            reaches_process |= actions.reach_process();
            waits_for_room |= actions.wait_for_room;
        }
        let by_escape = detours()
            .filter_map(|(detour, index)| Some((detour.escape()?.0, index)))
            .collect();
        let landings = |site: &Site| {
            let (at, detour) = (site.displaced.at(), site.detour.clone());
            let inside = (1..JUMP as u64).map(move |n| at.wrapping_add(n));
            inside.filter_map(move |at| Some((at, detour.as_ref()?.resume(at)?)))
        };
        let inside_jumps = sites.iter().flat_map(landings);
        let inside_jumps = inside_jumps.chain(parts.ghosts);
        let inside_jumps = inside_jumps.map(|(at, to)| (at.0, to)).collect();
        Self {
            by_address,
            by_slot,
            by_escape,
            inside_jumps,
            sites,
            retired: parts.retired,
            fixtures: parts.fixtures,
            returning: parts.returning,
            returns: Some(parts.returns),
            vacated: parts.vacated,
            followed: Stubs::of(parts.followed),
            ask_all: parts.ask_all,
            unwinder: parts.unwinder,
            steps,
            reaches_process,
            waits_for_room,
        }
    }

    /// Whether no site is armed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sites.is_empty()
    }

    pub(crate) fn steps(&self) -> bool {
        self.steps
    }

    pub(crate) fn reaches_process(&self) -> bool {
        self.reaches_process
    }

    pub(crate) fn waits_for_room(&self) -> bool {
        self.waits_for_room
    }

    /// The index of the armed site at `at`.
    #[must_use]
    pub fn find(&self, at: Gva) -> Option<u32> {
        self.by_address.get(&at.0).copied()
    }

    /// The armed site at `at`, with its index.
    #[must_use]
    pub fn at(&self, at: Gva) -> Option<(u32, &Site)> {
        let index = self.find(at)?;
        Some((index, self.site(index)?))
    }

    /// The site with that index.
    #[must_use]
    pub fn site(&self, index: u32) -> Option<&Site> {
        self.sites.get(index as usize)
    }

    /// The slot that `at` lies in, with the index of its site.
    pub(crate) fn slot_around(&self, at: Gva) -> Option<(u32, &SlotCode)> {
        // Slots are aligned to their size.
        let start = at.0 & !(SLOT_SIZE as u64 - 1);
        let index = *self.by_slot.get(&start)?;
        Some((index, self.site(index)?.slot.as_ref()?))
    }

    /// Where the instruction is whose copy, of a slot or a detour, is at `at`, and the site that the
    /// copy was made for. Looks at all sites: not for what every hit does.
    pub(crate) fn in_place(&self, at: Gva) -> Option<(Gva, &Site)> {
        if let Some((index, slot)) = self.slot_around(at) {
            let site = self.site(index)?;
            return Some((site.displaced.in_place(slot, at)?, site));
        }
        self.sites
            .iter()
            .find_map(|site| Some((site.detour.as_ref()?.in_place(at)?, site)))
    }

    /// The instruction that our code at `at` stands for, a copy or what serves probes before it, and how many bytes of
    /// the stack that has pushed. Likewise.
    pub(crate) fn stands_for(&self, at: Gva) -> Option<(Gva, u64)> {
        if !KERNEL_WINDOW.contains(at) {
            return None;
        }
        let copied = self.in_place(at).map(|(place, _)| (place, 0));
        let mut detours = self.sites.iter().filter_map(|site| site.detour.as_ref());
        copied.or_else(|| detours.find_map(|detour| detour.interrupted(at)))
    }

    /// The site whose detour asks for an exit at `at`.
    pub(crate) fn escape(&self, at: Gva) -> Option<u32> {
        self.by_escape.get(&at.0).copied()
    }

    /// Where to go on from the int3 at `at` in the bytes of a jump.
    pub(crate) fn inside_jump(&self, at: Gva) -> Option<Gva> {
        self.inside_jumps.get(&at.0).copied()
    }

    pub(crate) fn was_ours(&self, at: Gva) -> bool {
        self.retired.contains(&at.0)
    }

    /// The fixed places of the hidden region, while it is mapped.
    #[must_use]
    pub fn fixtures(&self) -> Option<&Fixtures> {
        self.fixtures.as_ref()
    }

    pub(crate) fn is_trampoline(&self, at: Gva) -> bool {
        self.fixtures
            .is_some_and(|fixtures| fixtures.trampoline() == at)
    }

    pub(crate) fn returning(&self, id: ProbeId) -> Option<&Returning> {
        self.returning.get(&id)
    }

    pub(crate) fn followed(&self) -> &Stubs {
        &self.followed
    }

    /// Whether `at`, a return address, says that not all of its task's calls can be found on the stack.
    pub(crate) fn asks_all(&self, at: Gva) -> bool {
        let is_of = |places: &Range<Gva>| places.start < at && at <= places.end;
        self.ask_all.iter().any(is_of)
    }

    /// What follows stacks.
    pub(crate) fn unwinder(&self) -> Option<&Unwinder> {
        self.unwinder.as_ref()
    }

    /// Where a call with `at` in the place of its return address goes on to, without what return probes put
    /// there: the trampoline, if the way leads there; `None` if it is code of ours that nobody knows any more.
    pub(crate) fn leads_to(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Option<Gva> {
        let mut leads_to = at;
        for _ in 0..NESTED_MAX {
            if !KERNEL_WINDOW.contains(leads_to) || self.is_trampoline(leads_to) {
                return Some(leads_to);
            }
            let (_, calls) = self.followed.whose(leads_to)?;
            leads_to = calls.return_address(leads_to, mem)?;
        }
        None
    }

    /// Where a function returns to that begins now and has found `at` in the place of its return address.
    pub(crate) fn caller(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Gva {
        if !KERNEL_WINDOW.contains(at) {
            return at;
        }
        let whose = self.followed.whose(at);
        whose
            .and_then(|(_, calls)| calls.caller(at, mem))
            .unwrap_or(at)
    }

    /// What a function has found at its entry in the place of its return address.
    pub(crate) fn found(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Found {
        if self.is_trampoline(at) {
            return Found::Trampoline;
        }
        match self.leads_to(mem, at) {
            Some(leads_to) if !self.is_trampoline(leads_to) => Found::Caller(at),
            // Without an end: of a probe that has left, which calls in flight may still lead to the
            // trampoline.
            Some(_) | None => Found::OnTheWay,
        }
    }

    /// Where a frame really returns to that got its return address back.
    pub(crate) fn vacated(&self, task: Gva, slot: Gva) -> Option<Gva> {
        self.vacated.get(task, slot)
    }

    /// What return probes share.
    #[must_use]
    pub fn returns(&self) -> Option<&Returns> {
        self.returns.as_deref()
    }
}
