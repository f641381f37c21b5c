//! The clocks that are read at a hit.

/// A reading of both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Nanoseconds of the host's `CLOCK_MONOTONIC`.
    pub host_ns: u64,
    /// The guest's time-stamp counter, as its RDTSC would have read it.
    pub guest_tsc: u64,
}

/// The clocks read at a hit.
pub trait Clock {
    /// Reads both clocks.
    fn now(&self) -> Reading;

    /// Returns the nanoseconds since `then`, which was read a moment ago.
    fn since(&self, then: &Reading) -> u64;
}
