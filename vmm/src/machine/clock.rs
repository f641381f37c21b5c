//! The clocks read at a hit: no system call, no ioctl.

use std::arch::x86_64::_rdtsc;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_introspect::world::Clock;

/// Host time and the guest's time-stamp counter as one virtual CPU sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostClock {
    /// Guest TSC minus host TSC.
    offset: u64,
}

impl HostClock {
    /// A clock whose guest TSC read `guest_tsc` a moment ago.
    pub(super) fn synchronised(guest_tsc: u64) -> Self {
        Self {
            offset: guest_tsc.wrapping_sub(rdtsc()),
        }
    }
}

/// Turns readings of the guest's time-stamp counter into host time.
#[derive(Debug)]
pub(super) struct TimeTable {
    /// Guest TSC minus host TSC, as virtual CPU 0 sees it: KVM keeps those of all virtual CPUs in
    /// step.
    offset: AtomicU64,
    /// Host time and host TSC at some moment.
    origin: (u64, u64),
}

impl TimeTable {
    pub(super) fn new() -> Self {
        Self {
            offset: AtomicU64::new(0),
            origin: (host_ns(), rdtsc()),
        }
    }

    /// The guest's counter goes as `clock` says.
    pub(super) fn set(&self, clock: &HostClock) {
        self.offset.store(clock.offset, Ordering::Relaxed);
    }

    /// What tells host time, nanoseconds of `CLOCK_MONOTONIC`, of a reading made not long ago.
    pub(super) fn now(&self) -> impl Fn(u64) -> u64 + use<> {
        let (ns, tsc) = (host_ns(), rdtsc());
        let (origin_ns, origin_tsc) = self.origin;
        let (elapsed_ns, elapsed_tsc) = (ns - origin_ns, tsc.wrapping_sub(origin_tsc).max(1));
        let guest_now = tsc.wrapping_add(self.offset.load(Ordering::Relaxed));
        move |reading| {
            // A reading on another processor may be ahead of ours by a little.
            let ago = guest_now.wrapping_sub(reading).cast_signed().max(0);
            let ago = u128::from(ago.unsigned_abs()) * u128::from(elapsed_ns);
            let ago = u64::try_from(ago / u128::from(elapsed_tsc)).unwrap_or(u64::MAX);
            ns.saturating_sub(ago)
        }
    }
}

fn rdtsc() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 processor and touches no memory.
    unsafe { _rdtsc() }
}

impl Clock for HostClock {
    fn host_ns(&self) -> u64 {
        host_ns()
    }

    fn guest_tsc(&self) -> u64 {
        rdtsc().wrapping_add(self.offset)
    }
}

fn host_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a valid timespec to write to. The clock always exists, so the call
    // cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds.wrapping_mul(1_000_000_000).wrapping_add(nanos)
}
