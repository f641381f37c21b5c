//! The clocks read at a hit: no system call, no ioctl.

use std::arch::x86_64::_rdtsc;

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

fn rdtsc() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 processor and touches no memory.
    unsafe { _rdtsc() }
}

impl Clock for HostClock {
    fn host_ns(&self) -> u64 {
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

    fn guest_tsc(&self) -> u64 {
        rdtsc().wrapping_add(self.offset)
    }
}
