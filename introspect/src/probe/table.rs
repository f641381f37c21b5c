//! The probe table: what the virtual CPUs look hits up in.
//!
//! Invariant: a table never changes once built. The control side builds a new one for every
//! change and hands it over while the virtual CPUs are stopped, so looking up takes no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Detour, JUMP};
use hvprobe_arch::insn::{Displaced, SLOT_SIZE, SlotCode, SlotKind};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_spec::{Actions, Budget, ProbeId};
use rustc_hash::{FxHashMap, FxHashSet};

use super::budget::Meter;
use super::returns::Vacated;
use crate::calls::{Calls, Found, Pool};
use crate::hidden::{Fixtures, KERNEL_WINDOW};
use crate::ring::{NESTED_MAX, Source};

/// Counts of one probe on one virtual CPU, on a cache line of their own: virtual CPUs that hit the
/// same probe do not slow each other down.
#[derive(Debug, Default)]
#[repr(align(64))]
struct VcpuCounts {
    hits: AtomicU64,
    missed: AtomicU64,
    faults: AtomicU64,
    vetoed: AtomicU64,
    orphans: AtomicU64,
    errors: AtomicU64,
    throttled: AtomicU64,
}

/// What a probe has counted, summed over the virtual CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Hits whose handlers ran; for a return probe, calls that returned through its handler.
    pub hits: u64,
    /// Hits without handlers (`nmissed`): because the virtual CPU was handling another one, a
    /// handler before this one changed the execution path, or a return probe had no free instance.
    pub missed: u64,
    /// Displaced instructions that faulted.
    pub faults: u64,
    /// Hits, or a return probe's calls, that a condition left alone.
    pub vetoed: u64,
    /// Calls whose function never returned: its task exited or its frame was abandoned.
    pub orphans: u64,
    /// Changes that a handler could not make, because the guest's memory was not there.
    pub errors: u64,
    /// Hits beyond the probe's budget: they made no event, and are not among the others.
    pub throttled: u64,
}

/// The counters of one probe, and its budget.
#[derive(Debug)]
pub struct Counters {
    vcpus: Box<[VcpuCounts]>,
    meter: Option<Meter>,
}

impl Counters {
    /// Counters at zero for a machine with `vcpus` virtual CPUs.
    #[must_use]
    pub fn new(vcpus: usize) -> Self {
        Self {
            vcpus: (0..vcpus).map(|_| VcpuCounts::default()).collect(),
            meter: None,
        }
    }

    /// As [`Counters::new`], for a probe with this budget.
    pub(super) fn with_budget(vcpus: usize, budget: Option<&Budget>) -> Self {
        Self {
            meter: budget.map(|budget| Meter::new(budget, vcpus)),
            ..Self::new(vcpus)
        }
    }

    pub(super) fn meter(&self) -> Option<&Meter> {
        self.meter.as_ref()
    }

    /// Whether the probe is, or is to be, turned off for exceeding its budget.
    pub(super) fn is_tripped(&self) -> bool {
        self.meter.as_ref().is_some_and(Meter::is_tripped)
    }

    /// Whether a hit at `now_ns` is within the probe's budget; if not, it is counted as throttled.
    pub(super) fn admit(&self, vcpu: u32, now_ns: u64) -> bool {
        match &self.meter {
            None => true,
            Some(meter) => self.admit_metered(meter, vcpu, now_ns),
        }
    }

    #[inline(never)]
    fn admit_metered(&self, meter: &Meter, vcpu: u32, now_ns: u64) -> bool {
        let admitted = meter.admit(now_ns);
        if !admitted {
            self.add(vcpu, |c| &c.throttled);
        }
        admitted
    }

    /// The hit at `now_ns` took `cost_ns`.
    pub(super) fn charge(&self, now_ns: u64, cost_ns: u64) {
        if let Some(meter) = &self.meter {
            meter.charge(now_ns, cost_ns);
        }
    }

    /// The sums over all virtual CPUs.
    #[must_use]
    pub fn sum(&self) -> Counts {
        let mut sum = Counts::default();
        for counts in &self.vcpus {
            sum.hits = sum.hits.saturating_add(counts.hits.load(Ordering::Relaxed));
            sum.missed = sum
                .missed
                .saturating_add(counts.missed.load(Ordering::Relaxed));
            sum.faults = sum
                .faults
                .saturating_add(counts.faults.load(Ordering::Relaxed));
            sum.vetoed = sum
                .vetoed
                .saturating_add(counts.vetoed.load(Ordering::Relaxed));
            sum.orphans = sum
                .orphans
                .saturating_add(counts.orphans.load(Ordering::Relaxed));
            sum.errors = sum
                .errors
                .saturating_add(counts.errors.load(Ordering::Relaxed));
            sum.throttled = sum
                .throttled
                .saturating_add(counts.throttled.load(Ordering::Relaxed));
        }
        sum
    }

    fn add(&self, vcpu: u32, which: impl Fn(&VcpuCounts) -> &AtomicU64) {
        if let Some(counts) = self.vcpus.get(vcpu as usize) {
            which(counts).fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Adds hits that no virtual CPU is known for.
    pub(crate) fn add_hits(&self, number: u64) {
        if let Some(counts) = self.vcpus.first() {
            counts.hits.fetch_add(number, Ordering::Relaxed);
        }
    }

    /// Adds hits that a condition left alone.
    pub(crate) fn add_vetoed(&self, number: u64) {
        if let Some(counts) = self.vcpus.first() {
            counts.vetoed.fetch_add(number, Ordering::Relaxed);
        }
    }

    pub(crate) fn hit(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.hits);
    }

    /// Adds calls that there was no free instance for.
    pub(crate) fn add_missed(&self, number: u64) {
        if let Some(counts) = self.vcpus.first() {
            counts.missed.fetch_add(number, Ordering::Relaxed);
        }
    }

    /// Adds calls that never returned.
    pub(crate) fn add_orphans(&self, number: u64) {
        if let Some(counts) = self.vcpus.first() {
            counts.orphans.fetch_add(number, Ordering::Relaxed);
        }
    }

    pub(crate) fn miss(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.missed);
    }

    pub(super) fn fault(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.faults);
    }

    pub(super) fn veto(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.vetoed);
    }

    pub(super) fn orphan(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.orphans);
    }

    pub(super) fn error(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.errors);
    }
}

/// What the engine itself wants to know of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Internal {
    /// The current task is about to run for the last time: its calls in flight are orphans.
    TaskDead,
    /// A task that has run for the last time is freed: so are the calls that it made since.
    TaskFreed,
    /// A module was loaded, or is about to be unloaded.
    Modules,
    /// The guest's ftrace is about to patch text.
    FtraceBegins,
    /// The guest's ftrace has patched text.
    FtraceEnds,
    /// The guest is about to copy the instruction that a kprobe of its own is at.
    Kprobe,
    /// The guest's kernel has faulted.
    Fault,
    /// The guest's kernel is about to make way for another.
    Kexec,
}

impl Internal {
    /// The id of the engine's own member: before all probes of a site, none of which can keep the
    /// hit from it.
    pub(super) const ID: ProbeId = ProbeId(0);

    /// Whether the virtual CPU waits there.
    pub(super) fn holds(&self) -> bool {
        match self {
            Self::TaskDead | Self::TaskFreed | Self::Fault => false,
            Self::Modules | Self::Kprobe | Self::FtraceBegins | Self::FtraceEnds | Self::Kexec => {
                true
            }
        }
    }
}

/// What a member does at a hit.
#[derive(Debug)]
pub(super) enum Role {
    /// A kprobe.
    Probe(Arc<Actions>),
    /// The entry of a return probe.
    Return {
        actions: Arc<Actions>,
        calls: Following,
    },
    /// The engine's own.
    Internal(Internal),
}

/// How the calls are followed that an exit has seen the entry of.
#[derive(Debug)]
pub(super) enum Following {
    /// They return through the trampoline, with another exit.
    Trampoline(Arc<Pool>),
    /// They return to code that records it, as those that a detour has seen the entry of.
    Stubs(Arc<Source>),
}

/// One probe at a probepoint.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) id: ProbeId,
    pub(super) counters: Arc<Counters>,
    pub(super) role: Role,
}

/// A probepoint: how its instruction takes effect, and the enabled probes there, in the order of
/// their registration.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) displaced: Displaced,
    /// The out-of-line copy; `None` when the instruction is emulated.
    pub(super) slot: Option<SlotCode>,
    /// Where the jump that is there instead of an int3 leads.
    pub(super) detour: Option<Arc<Detour>>,
    /// The instruction before it may be `sti`.
    pub(super) after_sti: bool,
    pub(super) members: Box<[Member]>,
    /// Whether one of them has a post-handler.
    pub(super) posts: bool,
}

/// A return probe, as its returns need it.
#[derive(Debug)]
pub(super) struct Returning {
    pub(super) counters: Arc<Counters>,
    pub(super) actions: Arc<Actions>,
    /// Disabled: calls that were entered before only go back to their callers.
    pub(super) disabled: bool,
}

/// What all virtual CPUs share for return probes.
#[derive(Debug)]
pub(super) struct Returns {
    pub(super) calls: Calls,
    /// Returns through the trampoline that no call was known for.
    pub(super) unmatched: AtomicU64,
    /// Numbers the calls.
    pub(super) next_call: AtomicU64,
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
    followed: Vec<Arc<Source>>,
    /// Whether an instruction is stepped.
    steps: bool,
    /// Whether handlers reach for memory.
    reaches_memory: bool,
}

/// What a table is made of.
#[derive(Debug)]
pub(super) struct Parts {
    /// Armed sites.
    pub(super) sites: Vec<Site>,
    pub(super) retired: Arc<FxHashSet<u64>>,
    pub(super) fixtures: Option<Fixtures>,
    pub(super) returning: FxHashMap<ProbeId, Returning>,
    pub(super) returns: Arc<Returns>,
    pub(super) vacated: Arc<Vacated>,
    pub(super) followed: Vec<Arc<Source>>,
    /// The int3s of detours without a site, and where to go on from each.
    pub(super) ghosts: Vec<(Gva, Gva)>,
}

impl ProbeTable {
    pub(super) fn new(parts: Parts) -> Self {
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
        let reaches_memory = actions
            .chain(at_return)
            .any(|actions| actions.reach_memory());
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
            followed: parts.followed,
            steps,
            reaches_memory,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sites.is_empty()
    }

    pub(super) fn steps(&self) -> bool {
        self.steps
    }

    pub(super) fn reaches_memory(&self) -> bool {
        self.reaches_memory
    }

    pub(super) fn find(&self, at: Gva) -> Option<u32> {
        self.by_address.get(&at.0).copied()
    }

    /// The armed site at `at`, with its index.
    pub(super) fn at(&self, at: Gva) -> Option<(u32, &Site)> {
        let index = self.find(at)?;
        Some((index, self.site(index)?))
    }

    pub(super) fn site(&self, index: u32) -> Option<&Site> {
        self.sites.get(index as usize)
    }

    /// The slot that `at` lies in, with the index of its site.
    pub(super) fn slot_around(&self, at: Gva) -> Option<(u32, &SlotCode)> {
        // Slots are aligned to their size.
        let start = at.0 & !(SLOT_SIZE as u64 - 1);
        let index = *self.by_slot.get(&start)?;
        Some((index, self.site(index)?.slot.as_ref()?))
    }

    /// Where the instruction is whose copy, of a slot or a detour, is at `at`, and the site that the
    /// copy was made for. Looks at all sites: not for what every hit does.
    pub(super) fn in_place(&self, at: Gva) -> Option<(Gva, &Site)> {
        if let Some((index, slot)) = self.slot_around(at) {
            let site = self.site(index)?;
            return Some((site.displaced.in_place(slot, at)?, site));
        }
        self.sites
            .iter()
            .find_map(|site| Some((site.detour.as_ref()?.in_place(at)?, site)))
    }

    /// The site whose detour asks for an exit at `at`.
    pub(super) fn escape(&self, at: Gva) -> Option<u32> {
        self.by_escape.get(&at.0).copied()
    }

    /// Where to go on from the int3 at `at` in the bytes of a jump.
    pub(super) fn inside_jump(&self, at: Gva) -> Option<Gva> {
        self.inside_jumps.get(&at.0).copied()
    }

    pub(super) fn was_ours(&self, at: Gva) -> bool {
        self.retired.contains(&at.0)
    }

    pub(super) fn fixtures(&self) -> Option<&Fixtures> {
        self.fixtures.as_ref()
    }

    pub(super) fn is_trampoline(&self, at: Gva) -> bool {
        self.fixtures
            .is_some_and(|fixtures| fixtures.trampoline() == at)
    }

    pub(super) fn returning(&self, id: ProbeId) -> Option<&Returning> {
        self.returning.get(&id)
    }

    pub(super) fn followed(&self) -> &[Arc<Source>] {
        &self.followed
    }

    /// What a function has found at its entry in the place of its return address.
    pub(super) fn found(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Found {
        if self.is_trampoline(at) {
            return Found::Trampoline;
        }
        let mut leads_to = at;
        for _ in 0..NESTED_MAX {
            if self.is_trampoline(leads_to) {
                return Found::OnTheWay;
            }
            if leads_to < KERNEL_WINDOW.start || leads_to >= KERNEL_WINDOW.end {
                return Found::Caller(at);
            }
            let mut calls = self.followed.iter().filter_map(|source| source.followed());
            match calls.find_map(|calls| calls.return_address(leads_to, mem)) {
                Some(next) => leads_to = next,
                None => break,
            }
        }
        // Of a probe that has left, which calls in flight may still lead to the trampoline.
        Found::OnTheWay
    }

    /// Where a frame really returns to that got its return address back.
    pub(super) fn vacated(&self, task: Gva, slot: Gva) -> Option<Gva> {
        self.vacated.get(task, slot)
    }

    pub(super) fn returns(&self) -> Option<&Returns> {
        self.returns.as_deref()
    }
}
