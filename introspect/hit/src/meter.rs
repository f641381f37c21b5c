//! Budgets: how much of the machine a probe's hits may take, and what happens to hits beyond it.
//!
//! ```text
//!               hit beyond the budget                check, once a second
//!   within ──────────────────────────► exceeded ─────────────────────────► turned off
//!     ▲         (policy: disable)                     (int3 taken out)         │
//!     └────────────────────────────────────────────────────────────────────────┘
//!                                  a user enables the probe
//! ```
//! With the policy *sample*, a probe stays *within*: further hits of a window are only counted.
//!
//! Invariants: every hit is either admitted or counted as throttled, and every throttled hit is reported in exactly
//! one notice; a window admits no more hits on all vCPUs together than the budget says. A throttled hit makes no
//! event and reads nothing of the guest. Other actions of the probe (changes, another path, a stop or a question)
//! are carried out nonetheless, because the guest relies on them; only turning the probe off ends them.
//!
//! Hot path: no lock, no allocation, no division, no clock of its own. vCPUs share one word per limit. It is
//! written at most once for each admitted hit, so no more often than the budget allows; beyond the budget, it is
//! only read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hvprobe_spec::{Budget, Excess};

/// Binary logarithm of a tick's length in nanoseconds. A tick is about a millisecond; times are shifted to get
/// ticks, not divided.
const TICK_SHIFT: u32 = 20;
/// Number of ticks of a window: 1.0003 s.
const WINDOW: u64 = 954;
/// Number of low bits of a pool's word, which hold the rest of the quota. The other bits hold the tick at which the
/// window began.
const LEFT_BITS: u32 = 36;
const LEFT: u64 = (1 << LEFT_BITS) - 1;
const TICKS: u64 = (1 << (64 - LEFT_BITS)) - 1;
/// Maximum number of ticks by which a vCPU's time may be earlier than the start of a window that another vCPU has
/// begun. It can be earlier because vCPUs read the time before they take from the quota.
const BEHIND: u64 = 4096;
/// Nanoseconds in one per cent of a second.
const PER_CENT: u64 = 10_000_000;

/// Quota per time window.
///
/// Ticks are known modulo 2^28, which is three days. If a probe has no hit for just that time, its old window
/// continues for a moment.
#[derive(Debug)]
struct Pool {
    limit: u64,
    word: AtomicU64,
}

impl Pool {
    fn new(limit: u64) -> Self {
        let limit = limit.min(LEFT);
        Self {
            limit,
            word: AtomicU64::new(limit),
        }
    }

    /// Returns the tick at which the window of `now_ns` began, and the rest of its quota.
    fn window(&self, word: u64, now_ns: u64) -> (u64, u64) {
        let (start, left) = (word >> LEFT_BITS, word & LEFT);
        let tick = now_ns >> TICK_SHIFT & TICKS;
        let age = tick.wrapping_sub(start) & TICKS;
        if (WINDOW..=TICKS - BEHIND).contains(&age) {
            (tick, self.limit)
        } else {
            (start, left)
        }
    }

    fn is_empty(&self, now_ns: u64) -> bool {
        self.window(self.word.load(Ordering::Relaxed), now_ns).1 == 0
    }

    /// Takes one unit of the quota; returns `false` if nothing is left.
    fn take(&self, now_ns: u64) -> bool {
        self.spend(now_ns, 1) > 0
    }

    /// Takes `amount` units of the quota, or all that are left. Returns the number of units that were left before.
    fn spend(&self, now_ns: u64, amount: u64) -> u64 {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let (start, left) = self.window(word, now_ns);
            if left == 0 {
                return 0;
            }
            let next = start << LEFT_BITS | left.saturating_sub(amount);
            // The word is the whole state; nothing else is published with it.
            match self
                .word
                .compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return left,
                Err(now) => word = now,
            }
        }
    }
}

/// A probe's budget, and what its hits have used of it.
#[derive(Debug)]
pub struct Meter {
    hits: Option<Pool>,
    /// Quota of time, in nanoseconds.
    time: Option<Pool>,
    excess: Excess,
    /// Whether the budget was exceeded under the policy to disable. Then nothing is admitted.
    tripped: AtomicBool,
    /// Number of throttled hits that notices have reported. For the control side.
    reported: AtomicU64,
}

impl Meter {
    /// Creates an unused budget on a machine with `vcpus` vCPUs.
    #[must_use]
    pub fn new(budget: &Budget, vcpus: usize) -> Self {
        let vcpus = u64::try_from(vcpus).unwrap_or(u64::MAX);
        let time = |percent: u8| Pool::new((u64::from(percent) * PER_CENT).saturating_mul(vcpus));
        Self {
            hits: budget.max_rate.map(|rate| Pool::new(rate.into())),
            time: budget.max_share.map(time),
            excess: budget.excess,
            tripped: AtomicBool::new(false),
            reported: AtomicU64::new(0),
        }
    }

    /// Returns whether a hit at `now_ns` is within the budget. If so, takes it off the budget.
    pub fn admit(&self, now_ns: u64) -> bool {
        if self.is_tripped() {
            return false;
        }
        let has_time = self.time.as_ref().is_none_or(|time| !time.is_empty(now_ns));
        let admitted = has_time && self.hits.as_ref().is_none_or(|hits| hits.take(now_ns));
        if !admitted && self.excess == Excess::Disable {
            self.tripped.store(true, Ordering::Relaxed);
        }
        admitted
    }

    /// Takes `cost_ns`, the cost of the hit at `now_ns`, off the quota of time.
    pub fn charge(&self, now_ns: u64, cost_ns: u64) {
        if let Some(time) = &self.time {
            time.spend(now_ns, cost_ns);
        }
    }

    /// Returns whether the budget was exceeded and the probe is, or is to be, turned off for that.
    #[must_use]
    pub fn is_tripped(&self) -> bool {
        self.tripped.load(Ordering::Relaxed)
    }

    /// Restores the budget of a probe that was turned off.
    pub fn reset(&self) {
        if self.tripped.swap(false, Ordering::Relaxed) {
            for pool in [&self.hits, &self.time].into_iter().flatten() {
                pool.word.store(pool.limit, Ordering::Relaxed);
            }
        }
    }

    /// Returns the number of throttled hits that no notice has reported, and counts them as reported. `throttled`
    /// is the number of all hits that were throttled so far.
    pub fn take_unreported(&self, throttled: u64) -> u64 {
        throttled - self.reported.swap(throttled, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn meter(max_rate: Option<u32>, max_share: Option<u8>, excess: Excess) -> Meter {
        let budget = Budget {
            max_rate,
            max_share,
            excess,
        };
        Meter::new(&budget, 2)
    }

    fn admitted(meter: &Meter, times: impl IntoIterator<Item = u64>) -> usize {
        let admitted = times.into_iter().filter(|now| meter.admit(*now));
        admitted.count()
    }

    #[test]
    fn a_window_admits_as_many_hits_as_the_budget_says() {
        let meter = meter(Some(100), None, Excess::Sample);
        let start = 1_000_000 * SECOND;
        assert_eq!(admitted(&meter, (0..1000).map(|n| start + n)), 100);
        // Just before the end of the window, and just after it.
        let end = start + (WINDOW << TICK_SHIFT);
        assert!(!meter.admit(end - (1 << TICK_SHIFT)));
        assert_eq!(admitted(&meter, (0..1000).map(|n| end + n)), 100);
        assert_eq!(
            admitted(&meter, (0..1000).map(|n| end + 9 * SECOND + n)),
            100
        );
        assert!(!meter.is_tripped());
    }

    #[test]
    fn virtual_cpu_that_is_behind_does_not_begin_a_window() {
        let meter = meter(Some(1), None, Excess::Sample);
        assert!(meter.admit(100 * SECOND));
        assert!(!meter.admit(99 * SECOND));
        assert!(!meter.admit(100 * SECOND));
    }

    #[test]
    fn exceeded_budget_stays_exceeded_until_it_is_reset() {
        let meter = meter(Some(2), None, Excess::Disable);
        assert_eq!(admitted(&meter, [1, 2, 3, 4]), 2);
        assert!(meter.is_tripped());
        assert!(!meter.admit(50 * SECOND));
        meter.reset();
        assert_eq!(admitted(&meter, [5, 6, 7]), 2);
    }

    #[test]
    fn share_is_of_the_time_of_all_virtual_cpus() {
        // 10 % of two vCPUs: 200 ms in a window.
        let meter = meter(None, Some(10), Excess::Sample);
        let hit = |now| {
            let admitted = meter.admit(now);
            if admitted {
                meter.charge(now, 30_000_000);
            }
            admitted
        };
        assert_eq!((0..100).filter(|n| hit(SECOND + n)).count(), 7);
        assert!(hit(3 * SECOND));
    }

    #[test]
    fn all_virtual_cpus_share_the_budget() {
        let meter = Arc::new(meter(Some(1000), None, Excess::Sample));
        let admitted: usize = std::thread::scope(|scope| {
            let one = || scope.spawn(|| admitted(&meter, (0..5000).map(|n| SECOND + n)));
            let threads = [one(), one(), one(), one()];
            threads.map(|thread| thread.join().unwrap()).iter().sum()
        });
        assert_eq!(admitted, 1000);
    }

    proptest! {
        #[test]
        fn no_window_admits_more_than_its_budget(
            rate in 1_u32..50,
            start in any::<u64>(),
            steps in prop::collection::vec(0_u64..200_000_000, 0..300),
        ) {
            let meter = meter(Some(rate), None, Excess::Sample);
            let mut now = start;
            let mut seen: Vec<u64> = Vec::new();
            for step in steps {
                now = now.wrapping_add(step);
                if meter.admit(now) {
                    seen.push(now);
                }
            }
            // Windows do not overlap, so a span of time that is shorter than a window overlaps at most two.
            for (n, first) in seen.iter().enumerate() {
                let within = seen[n..].iter().filter(|at| at.wrapping_sub(*first) < SECOND);
                prop_assert!(within.count() <= 2 * rate as usize);
            }
        }
    }
}
