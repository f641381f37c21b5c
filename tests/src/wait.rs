//! Waiting in tests: always with a bound, and with a word about what was seen when it is reached.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for something that takes a moment on a machine of its own: a guest on an
/// emulated processor in a busy machine is slow. Less than what `cargo lab test` lets pass in silence.
pub const LIMIT: Duration = Duration::from_secs(80);

/// How often one looks who has to look again and again: not so often that it keeps a processor from what is
/// looked at.
pub const PAUSE: Duration = Duration::from_millis(1);

/// Looks until it has seen `enough`; returns that. `what` says what is waited for.
///
/// # Panics
/// When it has not seen enough within [`LIMIT`]: says what it saw last.
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
