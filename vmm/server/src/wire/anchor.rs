//! Anchors, which relate the times of the API to the wall clock.
//!
//! All times are of `CLOCK_MONOTONIC`, which cannot be set. The wall clock may be set, and runs at another rate
//! while it is being corrected. So a client is sent a new anchor when the wall clock has moved by [`APART`].

use hvprobe_proto::v1;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// How far the wall clock may move from the last anchor that was sent, in nanoseconds.
const APART: u64 = 1_000_000;
/// Number of times that the clocks are read for an anchor.
const READINGS: usize = 3;

/// Reads both clocks at one moment.
pub(crate) fn now() -> v1::Anchor {
    of_clocks(clock_gettime)
}

/// Reads both clocks with `read` several times, and returns the reading that took the least time.
fn of_clocks(mut read: impl FnMut(ClockId) -> Timespec) -> v1::Anchor {
    let readings = (0..READINGS).map(|_| {
        let before = nanoseconds(read(ClockId::Monotonic));
        let realtime_ns = nanoseconds(read(ClockId::Realtime));
        let apart = nanoseconds(read(ClockId::Monotonic)).saturating_sub(before);
        let monotonic_ns = before.saturating_add(apart / 2);
        let anchor = v1::Anchor {
            monotonic_ns,
            realtime_ns,
        };
        (apart, anchor)
    });
    let best = readings.min_by_key(|(apart, _)| *apart);
    best.map_or_else(v1::Anchor::default, |(_, anchor)| anchor)
}

/// Converts `time` to nanoseconds. A time before 1970 is taken for 1970.
fn nanoseconds(time: Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(nanoseconds)
}

/// Last anchor that one client was sent.
#[derive(Debug, Default)]
pub(crate) struct LastSent(Option<v1::Anchor>);

impl LastSent {
    /// Returns the anchor `now` if the client has to be sent it: as the first one, or because the wall clock has
    /// moved since the last one.
    pub(crate) fn news(&mut self, now: v1::Anchor) -> Option<v1::Anchor> {
        let apart = |anchor: v1::Anchor| anchor.realtime_ns.wrapping_sub(anchor.monotonic_ns);
        let is_known = self.0.is_some_and(|sent| {
            let moved = apart(now).wrapping_sub(apart(sent)).cast_signed();
            moved.unsigned_abs() < APART
        });
        (!is_known).then(|| *self.0.insert(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn both_clocks_are_sent_as_they_are() {
        let (before, anchor) = (now(), now());
        assert!(anchor.monotonic_ns > before.monotonic_ns);
        let since = std::time::UNIX_EPOCH.elapsed().expect("it is after 1970");
        let now = u64::try_from(since.as_nanos()).expect("it is before 2554");
        assert!(now.abs_diff(anchor.realtime_ns) < 60 * SECOND);
    }

    #[test]
    fn a_clock_that_is_set_to_anything_is_sent_once_each_time() {
        let mut monotonic = 100;
        let mut last = LastSent::default();
        for (seconds, nanoseconds) in [
            (1_700_000_000, 0),
            (0, 0),
            (-1, 999_999_999),
            (i64::MIN, -1),
            (1_700_000_000, 5),
            (i64::MAX, 999_999_999),
        ] {
            let mut anchor = || {
                of_clocks(|clock| {
                    // Time passes while both are read.
                    monotonic += 1;
                    let (tv_sec, tv_nsec) = match clock {
                        ClockId::Realtime => (seconds, nanoseconds),
                        _ => (0, monotonic),
                    };
                    Timespec { tv_sec, tv_nsec }
                })
            };
            assert!(last.news(anchor()).is_some(), "{seconds}");
            let now = anchor();
            assert_eq!(last.news(now), None, "{seconds}: {now:?}");
        }
    }

    #[test]
    fn a_client_gets_an_anchor_again_only_after_the_wall_clock_has_moved() {
        let at = |monotonic_ns, realtime_ns| v1::Anchor {
            monotonic_ns,
            realtime_ns,
        };
        let mut last = LastSent::default();
        let mut news = |anchor| last.news(anchor).is_some();
        assert!(news(at(SECOND, 9 * SECOND)));
        assert!(!news(at(2 * SECOND, 10 * SECOND + 999_999)));
        assert!(news(at(2 * SECOND, 10 * SECOND + 1_000_000)));
        assert!(!news(at(3 * SECOND, 11 * SECOND + 1)));
        // The wall clock was set back, to before the machine was started.
        assert!(news(at(4 * SECOND, SECOND)));
        assert!(!news(at(5 * SECOND, 2 * SECOND)));
    }
}
