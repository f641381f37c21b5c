//! Counters of a probe.
//!
//! Invariant: vCPUs that hit the same probe never write to the same cache line.

use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_spec::Budget;

use super::meter::Meter;

/// Counts of one probe on one vCPU, on a cache line of their own: vCPUs that hit the same probe do not slow each
/// other down.
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

/// Counts of a probe, summed over the vCPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Hits whose handlers ran; for a return probe, calls that returned through its handler.
    pub hits: u64,
    /// Hits whose handlers did not run (`nmissed`): the vCPU was handling another hit, an earlier handler changed
    /// the execution path, a return probe had no free instance or was disabled at the return, or a filter could not
    /// decide.
    pub missed: u64,
    /// Displaced instructions that faulted.
    pub faults: u64,
    /// Hits, or a return probe's calls, that a condition rejected.
    pub vetoed: u64,
    /// Calls whose function never returned: its task exited or its frame was abandoned.
    pub orphans: u64,
    /// Changes that a handler could not make, because the guest's memory could not be accessed.
    pub errors: u64,
    /// Hits beyond the probe's budget: they made no event, and no other counter includes them.
    pub throttled: u64,
}

/// The counters of one probe, and its budget.
#[derive(Debug)]
pub struct Counters {
    vcpus: Box<[VcpuCounts]>,
    meter: Option<Meter>,
}

impl Counters {
    /// Creates counters at zero for a machine with `vcpus` vCPUs.
    #[must_use]
    pub fn new(vcpus: usize) -> Self {
        Self {
            vcpus: (0..vcpus).map(|_| VcpuCounts::default()).collect(),
            meter: None,
        }
    }

    /// Like [`Counters::new`], for a probe with the given budget.
    #[must_use]
    pub fn with_budget(vcpus: usize, budget: Option<&Budget>) -> Self {
        Self {
            meter: budget.map(|budget| Meter::new(budget, vcpus)),
            ..Self::new(vcpus)
        }
    }

    /// Returns the meter of the probe's budget, if it has one.
    #[must_use]
    pub fn meter(&self) -> Option<&Meter> {
        self.meter.as_ref()
    }

    /// Returns whether the probe is, or is to be, turned off for exceeding its budget.
    #[must_use]
    pub fn is_tripped(&self) -> bool {
        self.meter.as_ref().is_some_and(Meter::is_tripped)
    }

    /// Returns whether a hit at `now_ns` is within the probe's budget. If not, counts it as throttled.
    #[must_use]
    pub fn admit(&self, vcpu: u32, now_ns: u64) -> bool {
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

    /// Takes `cost_ns`, the cost of the hit at `now_ns`, off the probe's budget.
    pub fn charge(&self, now_ns: u64, cost_ns: u64) {
        if let Some(meter) = &self.meter {
            meter.charge(now_ns, cost_ns);
        }
    }

    /// Returns the sums over all vCPUs.
    #[must_use]
    pub fn sum(&self) -> Counts {
        let sum = |of: fn(&VcpuCounts) -> &AtomicU64| {
            let counts = self.vcpus.iter().map(|it| of(it).load(Ordering::Relaxed));
            counts.fold(0, u64::saturating_add)
        };
        Counts {
            hits: sum(|c| &c.hits),
            missed: sum(|c| &c.missed),
            faults: sum(|c| &c.faults),
            vetoed: sum(|c| &c.vetoed),
            orphans: sum(|c| &c.orphans),
            errors: sum(|c| &c.errors),
            throttled: sum(|c| &c.throttled),
        }
    }

    fn add(&self, vcpu: u32, which: impl Fn(&VcpuCounts) -> &AtomicU64) {
        if let Some(counts) = self.vcpus.get(vcpu as usize) {
            which(counts).fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Adds `number` to a counter, for hits whose vCPU is not known.
    fn add_number(&self, number: u64, which: impl Fn(&VcpuCounts) -> &AtomicU64) {
        if let Some(counts) = self.vcpus.first() {
            which(counts).fetch_add(number, Ordering::Relaxed);
        }
    }

    /// Adds `number` hits whose vCPU is not known.
    pub fn add_hits(&self, number: u64) {
        self.add_number(number, |c| &c.hits);
    }

    /// Adds `number` hits that a condition rejected.
    pub fn add_vetoed(&self, number: u64) {
        self.add_number(number, |c| &c.vetoed);
    }

    /// Counts a hit.
    pub fn hit(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.hits);
    }

    /// Adds `number` calls for which there was no free instance.
    pub fn add_missed(&self, number: u64) {
        self.add_number(number, |c| &c.missed);
    }

    /// Adds `number` calls that never returned.
    pub fn add_orphans(&self, number: u64) {
        self.add_number(number, |c| &c.orphans);
    }

    /// Counts a hit whose handlers did not run.
    pub fn miss(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.missed);
    }

    /// Counts a displaced instruction that faulted.
    pub fn fault(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.faults);
    }

    /// Returns whether `filter`, the result of the probe's filter, lets a hit count. If not, counts the hit as
    /// vetoed, or as missed if the filter could not decide (`None`).
    pub(crate) fn lets_pass(&self, vcpu: u32, filter: Option<bool>) -> bool {
        match filter {
            Some(true) => return true,
            Some(false) => self.veto(vcpu),
            None => self.miss(vcpu),
        }
        false
    }

    /// Counts a hit that a condition rejected.
    pub fn veto(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.vetoed);
    }

    /// Counts a call that never returned.
    pub fn orphan(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.orphans);
    }

    /// Counts a change that could not be made.
    pub fn error(&self, vcpu: u32) {
        self.add(vcpu, |c| &c.errors);
    }
}
