//! The probe table: what the virtual CPUs look hits up in.
//!
//! Invariant: a table never changes once built. The control side builds a new one for every
//! change and hands it over while the virtual CPUs are stopped, so looking up takes no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Displaced, SlotCode};
use rustc_hash::{FxHashMap, FxHashSet};

use super::ProbeId;

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
    /// Calls that a return probe's entry condition left alone.
    pub vetoed: u64,
    /// Calls whose function never returned: its task exited or its frame was abandoned.
    pub orphans: u64,
    /// Changes that a handler could not make, because the guest's memory was not there.
    pub errors: u64,
}

/// The counters of one probe.
#[derive(Debug)]
pub struct Counters {
    vcpus: Box<[VcpuCounts]>,
}

impl Counters {
    /// Counters at zero for a machine with `vcpus` virtual CPUs.
    #[must_use]
    pub fn new(vcpus: usize) -> Self {
        Self {
            vcpus: (0..vcpus).map(|_| VcpuCounts::default()).collect(),
        }
    }

    /// The sums over all virtual CPUs.
    #[must_use]
    pub fn sum(&self) -> Counts {
        let mut sum = Counts::default();
        for counts in &self.vcpus {
            sum.hits += counts.hits.load(Ordering::Relaxed);
            sum.missed += counts.missed.load(Ordering::Relaxed);
            sum.faults += counts.faults.load(Ordering::Relaxed);
            sum.vetoed += counts.vetoed.load(Ordering::Relaxed);
            sum.orphans += counts.orphans.load(Ordering::Relaxed);
            sum.errors += counts.errors.load(Ordering::Relaxed);
        }
        sum
    }

    fn add(&self, vcpu: u32, which: impl Fn(&VcpuCounts) -> &AtomicU64) {
        if let Some(counts) = self.vcpus.get(vcpu as usize) {
            which(counts).fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn hit(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.hits);
    }

    pub(super) fn miss(&self, vcpu: u32) {
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

/// One enabled probe at a site.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) id: ProbeId,
    pub(super) counters: Arc<Counters>,
}

/// One armed probepoint: the displaced instruction and the probes whose handlers run, in the order
/// of their registration.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) displaced: Displaced,
    /// The out-of-line copy; `None` when the instruction is emulated.
    pub(super) slot: Option<SlotCode>,
    pub(super) members: Box<[Member]>,
}

/// An immutable set of armed probepoints.
#[derive(Debug, Default)]
pub struct ProbeTable {
    by_address: FxHashMap<u64, u32>,
    /// Where execution falls out of a slot that was left without a step, because the copy faulted
    /// and the guest came back to it on its own.
    by_slot_end: FxHashMap<u64, u32>,
    sites: Vec<Site>,
    /// Addresses that carried one of our int3s once: a virtual CPU may still be on its way to the
    /// #BP entry with one of them in its exception frame.
    retired: Arc<FxHashSet<u64>>,
}

impl ProbeTable {
    /// A table of armed `sites`, and of `ghosts`: sites whose patch is gone but whose slot the
    /// guest may still return to.
    pub(super) fn new(sites: Vec<Site>, ghosts: Vec<Site>, retired: Arc<FxHashSet<u64>>) -> Self {
        let by_address = sites
            .iter()
            .zip(0..)
            .map(|(site, index)| (site.displaced.at().0, index))
            .collect();
        let mut sites = sites;
        sites.extend(ghosts);
        let by_slot_end = sites
            .iter()
            .zip(0..)
            .filter_map(|(site, index)| Some((site.slot.as_ref()?.next().0, index)))
            .collect();
        Self {
            by_address,
            by_slot_end,
            sites,
            retired,
        }
    }

    pub(super) fn find(&self, at: Gva) -> Option<u32> {
        self.by_address.get(&at.0).copied()
    }

    /// The site whose slot ends at `at`.
    pub(super) fn fell_out(&self, at: Gva) -> Option<&Site> {
        self.by_slot_end
            .get(&at.0)
            .and_then(|&index| self.site(index))
    }

    pub(super) fn site(&self, index: u32) -> Option<&Site> {
        self.sites.get(index as usize)
    }

    pub(super) fn was_ours(&self, at: Gva) -> bool {
        self.retired.contains(&at.0)
    }
}
