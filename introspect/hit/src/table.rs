//! The probe table, in which vCPUs look up hits.
//!
//! Invariant: a table never changes once built. The control side builds a new one for every change and hands it
//! over while the vCPUs are stopped, so a lookup takes no lock.

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
use super::restored_frames::RestoredFrames;
use crate::calls::{Calls, Pool, ReturnAddress};
use crate::record::{NESTED_MAX, RecordSource, Stubs};
use crate::region::{Fixtures, KERNEL_WINDOW};

/// What the engine itself needs from hits at one function, for all its hooks at that function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Internal {
    /// The current task is about to run for the last time: its calls in flight are orphans.
    pub task_dead: bool,
    /// The task in the function's first argument is freed after it has run for the last time. The calls that it
    /// made after `task_dead` are orphans too.
    pub task_freed: bool,
    /// The guest's kernel has faulted; the function's first argument points to the registers.
    pub fault: bool,
    /// Hooks that the engine is notified of while the vCPU waits.
    pub notifies: HookSet,
}

/// A set of the engine's hooks: a bit for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookSet(pub u32);

impl HookSet {
    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl Internal {
    /// Id of the engine's own member. It comes before all probes of a site, so none of them can keep the hit
    /// from it.
    pub const ID: ProbeId = ProbeId(0);

    /// Returns what `self` and `other` need together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            task_dead: self.task_dead || other.task_dead,
            task_freed: self.task_freed || other.task_freed,
            fault: self.fault || other.fault,
            notifies: HookSet(self.notifies.0 | other.notifies.0),
        }
    }

    /// Returns whether the vCPU has to wait at the hit until the engine has been notified.
    #[must_use]
    pub fn holds(&self) -> bool {
        !self.notifies.is_empty()
    }
}

/// What a member does at a hit.
#[derive(Debug)]
pub enum Role {
    /// A kprobe.
    Probe(Arc<Actions>),
    /// A return probe, hit at the entry of its function.
    Return {
        /// What happens at the entry and at the return.
        actions: Arc<Actions>,
        /// How its calls are followed.
        calls: Following,
    },
    /// Hooks of the engine.
    Internal(Internal),
}

/// How a return probe follows the calls whose entry took an exit.
#[derive(Debug)]
pub enum Following {
    /// They return through the trampoline, with another exit.
    Trampoline(Arc<Pool>),
    /// They return to code that records the return, like calls whose entry went through a detour.
    Stubs(Arc<RecordSource>),
}

/// A probe, or the engine, at a probepoint.
#[derive(Debug)]
pub struct Member {
    /// Id of the probe; [`Internal::ID`] for the engine.
    pub id: ProbeId,
    /// Its counters.
    pub counters: Arc<Counters>,
    /// What it does at a hit.
    pub role: Role,
}

/// A probepoint: how its instruction takes effect, and the enabled probes there, in the order of
/// their registration.
#[derive(Debug)]
pub struct Site {
    /// The instruction at the probepoint.
    pub displaced: Displaced,
    /// The out-of-line copy; `None` when the instruction is emulated.
    pub slot: Option<SlotCode>,
    /// The detour that the jump leads to, if there is a jump instead of an int3.
    pub detour: Option<Arc<Detour>>,
    /// Whether the instruction before the displaced one may be `sti`.
    pub after_sti: bool,
    /// The probes.
    pub members: Box<[Member]>,
    /// Whether any of the probes has a post-handler.
    pub posts: bool,
}

/// Data about a return probe that its returns need.
#[derive(Debug)]
pub struct Returning {
    /// Its counters.
    pub counters: Arc<Counters>,
    /// What happens at a return.
    pub actions: Arc<Actions>,
    /// Whether it is disabled. Calls that were entered before it was disabled still return to their callers, but
    /// count as missed.
    pub disabled: bool,
}

/// State for return probes that all vCPUs share.
#[derive(Debug)]
pub struct Returns {
    /// The calls in flight that return through the trampoline.
    pub calls: Calls,
    /// Number of returns through the trampoline for which no call was known.
    pub unmatched: AtomicU64,
    /// Number of the next call.
    pub next_call: AtomicU64,
}

/// An immutable set of armed probepoints.
#[derive(Debug, Default)]
pub struct ProbeTable {
    by_address: FxHashMap<u64, u32>,
    /// Sites with a slot, by the address of the slot.
    by_slot: FxHashMap<u64, u32>,
    /// Sites with a detour, by the int3 with which the detour asks for an exit.
    by_escape: FxHashMap<u64, u32>,
    /// Where the guest continues after an int3 in the bytes of a jump, and after an int3 of a detour whose site is
    /// gone.
    inside_jumps: FxHashMap<u64, Gva>,
    sites: Vec<Site>,
    /// Addresses that once had one of our int3s: a vCPU may still be on its way to the #BP entry with one of
    /// them in its exception frame.
    past_int3s: Arc<FxHashSet<u64>>,
    fixtures: Option<Fixtures>,
    returning: FxHashMap<ProbeId, Returning>,
    returns: Option<Arc<Returns>>,
    restored_frames: Arc<RestoredFrames>,
    /// The return probes that follow calls without exits.
    followed: Stubs,
    ask_all: Vec<Range<Gva>>,
    unwinder: Option<Unwinder>,
    /// Whether any instruction is stepped.
    steps: bool,
    /// Whether handlers access memory that may belong to the process.
    reaches_process: bool,
    /// Whether hits of any probe wait for room for their events.
    waits_for_room: bool,
}

/// The parts of a table.
#[derive(Debug)]
pub struct Parts {
    /// Armed sites.
    pub sites: Vec<Site>,
    /// Addresses that once had one of our int3s.
    pub past_int3s: Arc<FxHashSet<u64>>,
    /// The fixed places of the hidden region, while it is mapped.
    pub fixtures: Option<Fixtures>,
    /// The return probes.
    pub returning: FxHashMap<ProbeId, Returning>,
    /// State that the return probes share.
    pub returns: Arc<Returns>,
    /// Frames whose return addresses were restored.
    pub restored_frames: Arc<RestoredFrames>,
    /// The return probes that follow calls without exits.
    pub followed: Vec<Arc<RecordSource>>,
    /// Ranges of return addresses that show that some of a task's calls cannot be found on its stack. The start of
    /// a range is not part of it; its end is.
    pub ask_all: Vec<Range<Gva>>,
    /// The int3s of detours without a site, each with the address at which the guest continues.
    pub ghosts: Vec<(Gva, Gva)>,
    /// The unwinder, if the kernel has tables for it.
    pub unwinder: Option<Unwinder>,
}

impl ProbeTable {
    /// Builds a table from `parts`.
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
            past_int3s: parts.past_int3s,
            fixtures: parts.fixtures,
            returning: parts.returning,
            returns: Some(parts.returns),
            restored_frames: parts.restored_frames,
            followed: Stubs::of(parts.followed),
            ask_all: parts.ask_all,
            unwinder: parts.unwinder,
            steps,
            reaches_process,
            waits_for_room,
        }
    }

    /// Returns whether no site is armed.
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

    /// Returns the index of the armed site at `at`.
    #[must_use]
    pub fn find(&self, at: Gva) -> Option<u32> {
        self.by_address.get(&at.0).copied()
    }

    /// Returns the armed site at `at`, with its index.
    #[must_use]
    pub fn at(&self, at: Gva) -> Option<(u32, &Site)> {
        let index = self.find(at)?;
        Some((index, self.site(index)?))
    }

    /// Returns the site with this index.
    #[must_use]
    pub fn site(&self, index: u32) -> Option<&Site> {
        self.sites.get(index as usize)
    }

    /// Returns the slot that `at` lies in, with the index of its site.
    pub(crate) fn slot_around(&self, at: Gva) -> Option<(u32, &SlotCode)> {
        // Slots are aligned to their size.
        let start = at.0 & !(SLOT_SIZE as u64 - 1);
        let index = *self.by_slot.get(&start)?;
        Some((index, self.site(index)?.slot.as_ref()?))
    }

    /// Returns the address of the instruction whose copy, in a slot or a detour, is at `at`, and the site that the
    /// copy was made for. Searches all sites, so it must not be called at every hit.
    pub(crate) fn in_place(&self, at: Gva) -> Option<(Gva, &Site)> {
        if let Some((index, slot)) = self.slot_around(at) {
            let site = self.site(index)?;
            return Some((site.displaced.in_place(slot, at)?, site));
        }
        self.sites
            .iter()
            .find_map(|site| Some((site.detour.as_ref()?.in_place(at)?, site)))
    }

    /// Returns the address of the instruction for which our code at `at` stands: either the code is a copy of that
    /// instruction, or it serves the probes before the instruction. Also returns the number of bytes that this code
    /// has pushed on the stack. Searches all sites, so it must not be called at every hit.
    pub(crate) fn stands_for(&self, at: Gva) -> Option<(Gva, u64)> {
        if !KERNEL_WINDOW.contains(at) {
            return None;
        }
        let copied = self.in_place(at).map(|(place, _)| (place, 0));
        let mut detours = self.sites.iter().filter_map(|site| site.detour.as_ref());
        copied.or_else(|| detours.find_map(|detour| detour.interrupted(at)))
    }

    /// Returns the site whose detour asks for an exit at `at`.
    pub(crate) fn escape(&self, at: Gva) -> Option<u32> {
        self.by_escape.get(&at.0).copied()
    }

    /// Returns where the guest continues after the int3 at `at`, if that is in the bytes of a jump or in a detour
    /// without a site.
    pub(crate) fn inside_jump(&self, at: Gva) -> Option<Gva> {
        self.inside_jumps.get(&at.0).copied()
    }

    pub(crate) fn was_ours(&self, at: Gva) -> bool {
        self.past_int3s.contains(&at.0)
    }

    /// Returns the fixed places of the hidden region, while it is mapped.
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

    /// Returns whether the return address `at` shows that some of its task's calls cannot be found on the stack.
    pub(crate) fn asks_all(&self, at: Gva) -> bool {
        let is_of = |places: &Range<Gva>| places.start < at && at <= places.end;
        self.ask_all.iter().any(is_of)
    }

    /// Returns the unwinder.
    pub(crate) fn unwinder(&self) -> Option<&Unwinder> {
        self.unwinder.as_ref()
    }

    /// Follows `at`, which a call has in place of its return address, through the stubs of return probes. Returns
    /// the address to which the stubs lead: the caller's or the trampoline's. `None` if `at` leads to code of ours
    /// that the table does not know.
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

    /// Returns the real return address of a function that is just being entered and that has found `at` in place of
    /// its return address.
    pub(crate) fn caller(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Gva {
        if !KERNEL_WINDOW.contains(at) {
            return at;
        }
        let whose = self.followed.whose(at);
        whose
            .and_then(|(_, calls)| calls.caller(at, mem))
            .unwrap_or(at)
    }

    /// Classifies what a function has found at its entry in place of its return address.
    pub(crate) fn classify(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> ReturnAddress {
        if self.is_trampoline(at) {
            return ReturnAddress::Trampoline;
        }
        match self.leads_to(mem, at) {
            Some(leads_to) if !self.is_trampoline(leads_to) => ReturnAddress::Caller(at),
            // `at` leads to the trampoline, or to code of a probe that has left. Calls in flight of that probe may
            // still lead to the trampoline.
            Some(_) | None => ReturnAddress::OnTheWay,
        }
    }

    /// Returns the real return address of a frame whose return address was restored.
    pub(crate) fn restored(&self, task: Gva, slot: Gva) -> Option<Gva> {
        self.restored_frames.get(task, slot)
    }

    /// Returns the state that return probes share.
    #[must_use]
    pub fn returns(&self) -> Option<&Returns> {
        self.returns.as_deref()
    }
}
