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
    /// A clock of a guest whose TSC is what `read` finds, in the middle of the time that takes.
    pub(super) fn synchronised(read: impl FnOnce() -> Option<u64>) -> Option<Self> {
        let before = rdtsc();
        let guest_tsc = read()?;
        let took = rdtsc().wrapping_sub(before);
        Some(Self {
            offset: guest_tsc.wrapping_sub(before.wrapping_add(took / 2)),
        })
    }

    /// A clock whose guest TSC is the host's.
    pub(super) fn unsynchronised() -> Self {
        Self { offset: 0 }
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
            origin: both(),
        }
    }

    /// The guest's counter goes as `clock` says.
    pub(super) fn set(&self, clock: &HostClock) {
        self.offset.store(clock.offset, Ordering::Relaxed);
    }

    /// What tells host time, nanoseconds of `CLOCK_MONOTONIC`, of a reading made not long ago.
    pub(super) fn now(&self) -> impl Fn(u64) -> u64 + use<> {
        let (ns, tsc) = both();
        let (origin_ns, origin_tsc) = self.origin;
        let elapsed_ns = ns.saturating_sub(origin_ns);
        let elapsed_tsc = tsc.wrapping_sub(origin_tsc).max(1);
        let guest_now = tsc.wrapping_add(self.offset.load(Ordering::Relaxed));
        move |reading| {
            let ago = guest_now.wrapping_sub(reading).cast_signed();
            let apart = u128::from(ago.unsigned_abs()) * u128::from(elapsed_ns);
            let apart = u64::try_from(apart / u128::from(elapsed_tsc)).unwrap_or(u64::MAX);
            // What is known of the guest's counter is a little off, so a reading may seem to come.
            if ago < 0 {
                ns.saturating_add(apart)
            } else {
                ns.saturating_sub(apart)
            }
        }
    }
}

/// Host time and host TSC at one moment: of several readings the one that the least came between.
fn both() -> (u64, u64) {
    let readings = (0..5).map(|_| {
        let before = rdtsc();
        let ns = host_ns();
        let apart = rdtsc().wrapping_sub(before);
        (apart, ns, before.wrapping_add(apart / 2))
    });
    let (_, ns, tsc) = readings.min().unwrap_or_default();
    (ns, tsc)
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
