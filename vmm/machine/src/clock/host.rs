//! Clocks for hits. Reading them takes no system call and no ioctl, with any clock source of the host's kernel.
//!
//! Host time comes from the line in [`Times`]. The guest's TSC is computed from the host's by the [`Relation`].
//! Invariant: the host times that one vCPU reads never run back.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use hvprobe_hit::{Clock, Reading};
use hvprobe_vm::vcpu::Counters;

use super::relation::{Kvmclock, Relation};
use super::times::{Times, nanoseconds, rdtsc};

/// A reading: host and guest TSC at one moment.
#[derive(Clone, Copy, Debug)]
struct Both {
    host: u64,
    guest: u64,
    /// Error bound of both values, in ticks: the duration of the reading.
    apart: u64,
}

impl Both {
    fn offset(&self) -> u64 {
        self.guest.wrapping_sub(self.host)
    }

    /// Returns whether the guest's TSC stood still since `then`: it has advanced by less than half as much as the
    /// host's.
    fn stands_since(&self, then: &Self) -> bool {
        let [guest, host] =
            [(self.guest, then.guest), (self.host, then.host)].map(|(a, b)| a.wrapping_sub(b));
        guest.cast_signed() < host.cast_signed() / 2
    }
}

/// Host time and the guest's time-stamp counter, for one vCPU.
#[derive(Debug)]
pub(crate) struct HostClock {
    times: Arc<Times>,
    relation: Arc<Relation>,
    kvmclock: RefCell<Kvmclock>,
    /// Whether the guest's TSC stalls.
    stalls: bool,
    /// Error bound of the offset that was learned last, in ticks.
    exact: Option<u64>,
    /// Offset at the last reading.
    offset: Cell<u64>,
    /// Host time of the last reading, the minimum for the next. Without it, time could run back: the line may be
    /// adjusted between reading it and reading the TSC, and the thread may move to a processor whose TSC is behind.
    last_host_ns: Cell<u64>,
    /// Guest TSC of the last reading.
    counter: Cell<u64>,
    /// Rate of the line at the last reading, in nanoseconds per tick times 2^32.
    rate: Cell<u64>,
}

/// Maximum step back of the guest's TSC, in ticks, that counts as an error of KVM's samples: about half a
/// millisecond. A larger step means that the guest has set its TSC back.
const BACK: i64 = 1 << 20;

impl HostClock {
    /// Creates a clock whose guest TSC equals the host's until it learns an offset.
    pub(crate) fn new(times: Arc<Times>, relation: Arc<Relation>, kvmclock: Kvmclock) -> Self {
        Self {
            times,
            relation,
            kvmclock: RefCell::new(kvmclock),
            stalls: false,
            exact: None,
            offset: Cell::new(0),
            last_host_ns: Cell::new(0),
            counter: Cell::new(0),
            rate: Cell::new(0),
        }
    }

    /// Learns the offset of the guest's TSC, and whether that TSC stalls. `read` reads the guest's TSC. It is
    /// called once if the TSC is known to stall, and mostly twice otherwise. Called after the vCPU was parked.
    pub(crate) fn learn(&mut self, mut read: impl FnMut() -> Option<Counters>) {
        let Some(seen) = self.both(&mut read) else {
            return;
        };
        if self.stalls {
            self.renew();
            return;
        }
        let Some((seen, again)) = self.far_apart(seen, &mut read) else {
            return;
        };
        if again.stands_since(&seen) {
            self.stalls = true;
            self.relation.set_stalling();
            self.renew();
            return;
        }
        let best = if again.apart < seen.apart {
            again
        } else {
            seen
        };
        let changed = best.offset().wrapping_sub(self.relation.offset());
        let within = self.exact.map(|known| known.saturating_add(best.apart));
        if within.is_none_or(|within| changed.cast_signed().unsigned_abs() > within) {
            self.exact = Some(best.apart);
            self.relation.note(best.guest, best.offset());
        }
    }

    /// Returns two consecutive readings that are far enough apart to show whether the guest's TSC advances by
    /// itself. A TSC that stalls advances only while it is read. The first reading is `seen` or a later one.
    /// Returns `None` if `read` fails, or if this thread is interrupted for too long.
    fn far_apart(
        &self,
        mut seen: Both,
        mut read: impl FnMut() -> Option<Counters>,
    ) -> Option<(Both, Both)> {
        let start = seen.host;
        while rdtsc().wrapping_sub(start) < LONGEST_WAIT {
            let enough = seen.apart.max(SHORTEST_WAIT).saturating_mul(8);
            while rdtsc().wrapping_sub(seen.host) < enough {
                std::hint::spin_loop();
            }
            let again = self.both(&mut read)?;
            if again.host.wrapping_sub(seen.host) / 8 >= again.apart.max(seen.apart) {
                return Some((seen, again));
            }
            // A TSC that stalls may have advanced during the last reading, so start again with another reading.
            seen = self.both(&mut read)?;
        }
        None
    }

    fn both(&self, read: impl FnOnce() -> Option<Counters>) -> Option<Both> {
        let before = rdtsc();
        let counters = read()?;
        let apart = rdtsc().wrapping_sub(before);
        self.relation.set_sample_at(counters.kvmclock);
        Some(Both {
            host: before.wrapping_add(apart / 2),
            guest: counters.tsc,
            apart,
        })
    }

    /// Returns the guest's TSC at the moment when the host's is `tsc`. After a small step back of the offset,
    /// continues right after the last value instead.
    #[inline]
    fn counter(&self, tsc: u64) -> u64 {
        let (last, seems) = (self.counter.get(), tsc.wrapping_add(self.relation.offset()));
        let back = last.wrapping_sub(seems).cast_signed();
        let now = match (0..BACK).contains(&back) {
            true => last.wrapping_add(1),
            false => seems,
        };
        self.counter.set(now);
        now
    }

    #[cold]
    fn renew(&self) {
        if let Some(sample) = self.relation.sample() {
            self.relation.renew(sample, &mut self.kvmclock.borrow_mut());
        }
    }
}

/// Minimum error bound, in ticks, that is assumed for a reading. Two readings that are to show a stall are at least
/// eight times as far apart as their error bound.
const SHORTEST_WAIT: u64 = 10_000;
/// Maximum time, in ticks, to obtain two such readings: tens of milliseconds.
const LONGEST_WAIT: u64 = 1 << 26;

impl Clock for HostClock {
    #[inline]
    fn now(&self) -> Reading {
        let line = self.times.line();
        let tsc = rdtsc();
        let host_ns = line.at(tsc).max(self.last_host_ns.get());
        if self.stalls {
            self.renew();
            self.relation.mark(host_ns);
        }
        let guest_tsc = self.counter(tsc);
        self.offset.set(guest_tsc.wrapping_sub(tsc));
        self.last_host_ns.set(host_ns);
        self.rate.set(line.rate);
        Reading { host_ns, guest_tsc }
    }

    #[inline]
    fn since(&self, then: &Reading) -> u64 {
        let now = rdtsc().wrapping_add(self.offset.get());
        let ticks = now.wrapping_sub(then.guest_tsc).cast_signed();
        nanoseconds(ticks.max(0).cast_unsigned(), self.rate.get())
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_vm::memory::GuestRam;

    use super::super::times::{Line, Moment, SHORTEST, monotonic_ns};
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Returns a clock whose guest TSC equals the host's.
    fn clock(times: &Arc<Times>) -> HostClock {
        let ram = Arc::new(GuestRam::new(64 << 20).unwrap());
        let relation = Arc::new(Relation::new(ram, None));
        HostClock::new(Arc::clone(times), relation, Kvmclock::new(|| None))
    }

    #[test]
    fn no_time_of_a_virtual_cpu_is_before_an_earlier_one() {
        let times = Arc::new(Times::new());
        let clock = clock(&times);
        let ns = clock.now().host_ns + SECOND;
        let line = |ns| Line {
            from: Moment { ns, tsc: rdtsc() },
            rate: 1 << 31,
        };
        times.publish(line(ns));
        let first = clock.now().host_ns;
        assert!(first >= ns);
        times.publish(line(ns - 1_000_000));
        assert_eq!(clock.now().host_ns, first);
        times.publish(line(first + 1_000_000));
        assert!(clock.now().host_ns > first);
    }

    #[test]
    fn no_counter_runs_back_but_one_that_the_guest_sets() {
        let times = Arc::new(Times::new());
        let clock = clock(&times);
        let offset = 1 << 40;
        clock.relation.note(0, offset);
        let first = clock.now();
        clock.relation.note(0, offset - (1 << 19));
        let second = clock.now();
        assert!((first.guest_tsc..first.guest_tsc + (1 << 19)).contains(&second.guest_tsc));
        assert!(second.guest_tsc > first.guest_tsc);
        assert!(clock.since(&second) < SECOND);
        clock.relation.note(0, offset - (1 << 30));
        assert!(clock.now().guest_tsc < first.guest_tsc);
    }

    #[test]
    fn times_are_those_of_the_host() {
        let times = Arc::new(Times::new());
        let clock = clock(&times);
        let start = monotonic_ns();
        while monotonic_ns() < start + 20 * SHORTEST {}
        times.adjust();
        let (before, read, after) = (monotonic_ns(), clock.now(), monotonic_ns());
        let seen = read.host_ns;
        // The rate has an error after so short a time.
        let slack = 1_000_000;
        assert!(
            (before - slack..after + slack).contains(&seen),
            "{seen} in {before}..{after}"
        );
        assert!(times.line().at(read.guest_tsc).abs_diff(seen) < 10_000_000);
        let then = monotonic_ns();
        while monotonic_ns() < then + 5 * SHORTEST {}
        let (since, after) = (clock.since(&read), monotonic_ns());
        assert!(
            (5 * SHORTEST - slack..after - before + slack).contains(&since),
            "{since} of {before}..{after}"
        );
    }
}
