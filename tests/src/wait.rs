//! Waits with a time limit for tests. The panic at the limit reports the last value seen.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a wait. On an idle machine the condition becomes true within a moment, but a guest on an emulated
/// processor of a busy machine is slow. Less than the time that `cargo lab test` allows without output.
pub const LIMIT: Duration = Duration::from_secs(80);

/// Interval of polling: long enough not to keep the processor from the work that is waited for.
pub const PAUSE: Duration = Duration::from_millis(1);

/// Calls `look` until `enough` accepts its result; returns that result. `what` names the condition in the message
/// of the panic.
///
/// # Panics
/// When no result is accepted within [`LIMIT`]. The message has the last result.
pub fn until<T: Debug>(what: &str, mut look: impl FnMut() -> T, enough: impl Fn(&T) -> bool) -> T {
    let since = Instant::now();
    loop {
        let seen = look();
        if enough(&seen) {
            return seen;
        }
        assert!(
            since.elapsed() < LIMIT,
            "no {what} within {LIMIT:?}; seen last: {seen:?}"
        );
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_looks_until_it_has_seen_enough() {
        let mut numbers = 0..;
        assert_eq!(
            until("ten", || numbers.next(), |n| *n == Some(10)),
            Some(10)
        );
    }
}
