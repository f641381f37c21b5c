//! Metrics that a machine records about itself.
//!
//! Invariant: no limit depends on a metric. Each metric is written by one thread, when that thread parks or begins,
//! so measuring costs a hit nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_vm::vcpu::Ioctls;

/// The metrics of one machine.
#[derive(Debug)]
pub(crate) struct Metrics {
    ioctls: Box<[IoctlTotals]>,
    /// Host time of the first entry into the guest; 0 before.
    first_entry_ns: AtomicU64,
}

/// Ioctl counts of one vCPU.
#[derive(Debug, Default)]
struct IoctlTotals {
    run: AtomicU64,
    other: AtomicU64,
}

impl Metrics {
    /// Returns the metrics of a machine with `cpus` vCPUs, none of which has run.
    pub(crate) fn new(cpus: usize) -> Self {
        Self {
            ioctls: (0..cpus).map(|_| IoctlTotals::default()).collect(),
            first_entry_ns: AtomicU64::new(0),
        }
    }

    /// Publishes the counts of vCPU `index`, which parks or ends.
    pub(crate) fn set_ioctls(&self, index: usize, ioctls: Ioctls) {
        let totals = &self.ioctls[index];
        totals.run.store(ioctls.run, Ordering::Relaxed);
        totals.other.store(ioctls.other, Ordering::Relaxed);
    }

    /// Returns the counts of each vCPU.
    pub(crate) fn ioctls(&self) -> Vec<Ioctls> {
        let read = |totals: &IoctlTotals| Ioctls {
            run: totals.run.load(Ordering::Relaxed),
            other: totals.other.load(Ordering::Relaxed),
        };
        self.ioctls.iter().map(read).collect()
    }

    /// Sets the host time of the first entry into the guest.
    pub(crate) fn set_first_entry(&self, ns: u64) {
        self.first_entry_ns.store(ns, Ordering::Relaxed);
    }

    /// Returns the host time of the first entry into the guest, if there was one.
    pub(crate) fn first_entry(&self) -> Option<u64> {
        match self.first_entry_ns.load(Ordering::Relaxed) {
            0 => None,
            ns => Some(ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vcpu_has_its_own_counts_and_the_first_entry_is_unknown_before_it() {
        let metrics = Metrics::new(2);
        assert_eq!(metrics.first_entry(), None);
        metrics.set_first_entry(7);
        assert_eq!(metrics.first_entry(), Some(7));
        let counts = Ioctls { run: 3, other: 1 };
        metrics.set_ioctls(1, counts);
        assert_eq!(metrics.ioctls(), [Ioctls::default(), counts]);
    }
}
