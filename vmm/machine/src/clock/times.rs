//! Host time, computed from the host's TSC by a linear function, the *line*.
//!
//! The line is adjusted to `CLOCK_MONOTONIC` from time to time. Only the adjustment reads that clock, because on
//! hosts whose kernel does not trust the TSC, a reading takes a system call and an access to a slow device.
//! Invariants: from the moment of an adjustment on, it never sets the time back. Readers of the line never wait.

use std::arch::x86_64::_rdtsc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Minimum time between two moments from which a rate is computed, in nanoseconds.
pub(crate) const SHORTEST: u64 = 1_000_000;
/// Minimum time between adjustments of the line, in nanoseconds.
const LEFT_ALONE: u64 = 50_000_000;
/// Time in which an adjustment makes up for a difference, in nanoseconds.
const HORIZON: u64 = 1_000_000_000;
/// Rate that is assumed for a TSC whose rate is unknown: that of 2 GHz.
const UNKNOWN: u64 = 1 << 31;
/// How far the line may be behind the right time before an adjustment makes it jump, in nanoseconds.
const LATE: u64 = 10_000_000;
/// The rate is computed over the last one or two periods of this length, in nanoseconds.
const MEMORY: u64 = 16_000_000_000;

/// A time, and the host's TSC at that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment {
    pub(crate) ns: u64,
    pub(crate) tsc: u64,
}

impl Moment {
    /// Returns the current moment, with the time that `read` returns. Reads several times and keeps the quickest
    /// reading.
    pub(crate) fn of(read: impl Fn() -> Option<u64>) -> Option<Self> {
        let readings = (0..5).filter_map(|_| {
            let before = rdtsc();
            let ns = read()?;
            let apart = rdtsc().wrapping_sub(before);
            let tsc = before.wrapping_add(apart / 2);
            Some((apart, Self { ns, tsc }))
        });
        Some(readings.min()?.1)
    }

    fn now() -> Self {
        Self::of(|| Some(monotonic_ns())).unwrap_or_default()
    }

    /// Returns the number of ticks in `ns` nanoseconds, at the rate from `then` to this moment; `None` if that time
    /// is too short to know the rate.
    pub(crate) fn ticks_in(self, ns: u64, then: Self) -> Option<u64> {
        let rate = rate(then, self)?;
        u64::try_from((u128::from(ns) << 32) / u128::from(rate.max(1))).ok()
    }
}

/// The line: a linear function from TSC values to times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) from: Moment,
    /// Nanoseconds per tick, times 2^32.
    pub(crate) rate: u64,
}

impl Line {
    /// Returns the time, in nanoseconds, at which the TSC is `tsc`.
    #[inline]
    pub(crate) fn at(&self, tsc: u64) -> u64 {
        let ticks = tsc.wrapping_sub(self.from.tsc).cast_signed();
        let apart = nanoseconds(ticks.unsigned_abs(), self.rate);
        // The line's start may be slightly after `tsc`, if its TSC was read on another processor.
        if ticks < 0 {
            self.from.ns.saturating_sub(apart)
        } else {
            self.from.ns.saturating_add(apart)
        }
    }

    /// Returns the line to use from `now` on: it continues this line without a step back, and meets the right time
    /// after [`HORIZON`]. `rate` is the rate measured until `now`, in nanoseconds per tick times 2^32. A line that
    /// is more than [`LATE`] behind jumps to the right time at once.
    fn bent(&self, now: Moment, rate: u64) -> Self {
        let said = self.at(now.tsc);
        if now.ns.saturating_sub(said) > LATE {
            return Self { from: now, rate };
        }
        // The line starts at the time of the old one, so that there is no step, and meets the right time after
        // [`HORIZON`].
        let wanted = HORIZON.saturating_add(now.ns).saturating_sub(said);
        let bent = u128::from(rate) * u128::from(wanted) / u128::from(HORIZON);
        let bent = u64::try_from(bent).unwrap_or(u64::MAX);
        Self {
            from: Moment { ns: said, ..now },
            rate: bent.clamp(rate / 2, rate.saturating_mul(2)),
        }
    }
}

/// Returns the duration of `ticks` at `rate`, in nanoseconds.
#[inline]
pub(crate) fn nanoseconds(ticks: u64, rate: u64) -> u64 {
    let ns = (u128::from(ticks) * u128::from(rate)) >> 32;
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// Returns the rate between two moments, in nanoseconds per tick times 2^32; `None` if they are too close to know
/// it.
fn rate(since: Moment, now: Moment) -> Option<u64> {
    let ns = now.ns.checked_sub(since.ns).filter(|ns| *ns >= SHORTEST)?;
    let ticks = now.tsc.checked_sub(since.tsc).filter(|ticks| *ticks > 0)?;
    u64::try_from((u128::from(ns) << 32) / u128::from(ticks)).ok()
}

/// Moments from which rates are computed.
#[derive(Debug)]
struct Past {
    /// Moment from which the current rate is computed.
    since: Moment,
    /// The moment that replaces `since` next.
    next: Moment,
}

/// One of the two places where a line is stored.
#[derive(Debug, Default)]
struct Place {
    ns: AtomicU64,
    tsc: AtomicU64,
    rate: AtomicU64,
}

/// Converts TSC values to times, for all threads of a machine.
#[derive(Debug)]
pub(crate) struct Times {
    /// Number of lines so far. The newest line is in the place with this number modulo 2. The next line is written
    /// to the other place before the number changes.
    lines: AtomicU64,
    places: [Place; 2],
    past: Mutex<Past>,
}

impl Times {
    /// Measures the rate and creates the first line, which takes [`SHORTEST`]. A guessed rate might make time run
    /// back later.
    pub(crate) fn new() -> Self {
        let since = Moment::now();
        let from = loop {
            let now = Moment::now();
            if now.ns.saturating_sub(since.ns) >= SHORTEST {
                break now;
            }
        };
        let times = Self {
            lines: AtomicU64::new(0),
            places: Default::default(),
            past: Mutex::new(Past { since, next: from }),
        };
        let rate = rate(since, from).unwrap_or(UNKNOWN);
        times.publish(Line { from, rate });
        times
    }

    pub(crate) fn publish(&self, line: Line) {
        let next = self.lines.load(Ordering::Relaxed).wrapping_add(1);
        let place = &self.places[usize::from(next & 1 == 1)];
        // A reader that sees any of these stores also sees that another line was counted since it began to read
        // this place.
        fence(Ordering::Release);
        place.ns.store(line.from.ns, Ordering::Relaxed);
        place.tsc.store(line.from.tsc, Ordering::Relaxed);
        place.rate.store(line.rate, Ordering::Relaxed);
        self.lines.store(next, Ordering::Release);
    }

    #[inline]
    pub(crate) fn line(&self) -> Line {
        loop {
            let number = self.lines.load(Ordering::Acquire);
            let place = &self.places[usize::from(number & 1 == 1)];
            let line = Line {
                from: Moment {
                    ns: place.ns.load(Ordering::Relaxed),
                    tsc: place.tsc.load(Ordering::Relaxed),
                },
                rate: place.rate.load(Ordering::Relaxed),
            };
            // A place is written again only after a line in the other place has been counted. If none has, the line
            // is whole.
            fence(Ordering::Acquire);
            if self.lines.load(Ordering::Relaxed) == number {
                return line;
            }
        }
    }

    /// Adjusts the line, unless it was adjusted recently or another thread is adjusting it. Not for the hit path.
    pub(crate) fn adjust(&self) {
        let Ok(mut past) = self.past.try_lock() else {
            return;
        };
        let line = self.line();
        if line.at(rdtsc()).saturating_sub(line.from.ns) < LEFT_ALONE {
            return;
        }
        let now = Moment::now();
        let Some(rate) = rate(past.since, now) else {
            return;
        };
        self.publish(line.bent(now, rate));
        if now.ns.saturating_sub(past.next.ns) >= MEMORY {
            past.since = std::mem::replace(&mut past.next, now);
        }
    }
}

/// Returns the host's time-stamp counter.
#[inline]
pub(crate) fn rdtsc() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 processor and touches no memory.
    unsafe { _rdtsc() }
}

/// Returns nanoseconds of `CLOCK_MONOTONIC`. Not for the hit path.
pub(crate) fn monotonic_ns() -> u64 {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn moment(ns: u64, tsc: u64) -> Moment {
        Moment { ns, tsc }
    }

    proptest! {
        /// A counter of `mhz` MHz is read at random intervals, each time slightly off the right moment.
        #[test]
        fn time_goes_on_from_where_it_was_and_comes_close(
            mhz in 100..5000_u64,
            start in any::<u32>(),
            looks in prop::collection::vec((50..2000_u64, -20_000..20_000_i64), 40..80),
        ) {
            let tsc = |ns: u64| u64::from(start) + ns * mhz / 1000;
            let since = moment(0, tsc(0));
            let mut line = Line {
                from: moment(SECOND, tsc(SECOND)),
                rate: rate(since, moment(SECOND, tsc(SECOND))).unwrap(),
            };
            let mut ns = SECOND;
            for (ms, off) in looks {
                let before = line.at(tsc(ns));
                ns += ms * 1_000_000;
                let said = line.at(tsc(ns));
                prop_assert!(said >= before);
                let now = moment(ns.saturating_add_signed(off), tsc(ns));
                line = line.bent(now, rate(since, now).unwrap());
                prop_assert!(line.at(tsc(ns)) >= said);
                prop_assert!(line.at(tsc(ns)) - said <= LATE + 20_000);
            }
            prop_assert!(line.at(tsc(ns)).abs_diff(ns) < 200_000, "{line:?} at {ns}");
        }
    }

    #[test]
    fn a_clock_that_was_off_is_made_up_for_without_running_back() {
        let rate_of_2_ghz = 1 << 31;
        // Ahead by five milliseconds.
        let mut line = Line {
            from: moment(5_000_000, 0),
            rate: rate_of_2_ghz,
        };
        for second in 1..6 {
            let tsc = 2 * second * SECOND;
            let said = line.at(tsc);
            line = line.bent(moment(second * SECOND, tsc), rate_of_2_ghz);
            assert_eq!(line.at(tsc), said);
            assert!(line.at(tsc + 2000) > said);
        }
        assert!(line.at(12 * SECOND).abs_diff(6 * SECOND) < 10);
        // The host has slept, and its TSC did not advance meanwhile.
        let woken = moment(3600 * SECOND, 12 * SECOND);
        assert_eq!(line.bent(woken, rate_of_2_ghz).at(woken.tsc), woken.ns);
    }

    #[test]
    fn nonsense_makes_no_rate() {
        let now = moment(2 * SECOND, 2 * SECOND);
        for since in [
            now,
            moment(3 * SECOND, 0),
            moment(0, 3 * SECOND),
            moment(2 * SECOND - 1, 0),
        ] {
            assert_eq!(rate(since, now), None);
        }
        assert_eq!(rate(moment(0, 0), now), Some(1 << 32));
    }
}
