//! Channel 2 of the machine's interval timer, as a clock that does not depend on the processor's counter: KVM
//! computes its count from the host's time when it is read (`pit_get_count` in arch/x86/kvm/i8254.c).
//!
//! Stock kernels do not use that channel, which is the loudspeaker's.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::sys;

const CHANNEL: u16 = 0x42;
const CONTROL: u16 = 0x43;
/// Command: channel 2 counts down from 2^16 repeatedly (mode 2), and is read and written low byte first.
const START: u8 = 0xb4;
/// Command: channel 2 latches its count for the next two reads.
const LATCH: u8 = 0x80;
/// Counts per second.
const FREQUENCY: u64 = 1_193_182;

/// The running timer.
#[derive(Debug)]
pub(crate) struct Pit {
    /// Locked from the latch command until the second byte has been read.
    reading: Mutex<()>,
}

impl Pit {
    /// Starts the timer, and lets this thread and the threads that it starts read it.
    pub(crate) fn start() -> io::Result<Self> {
        for port in [CHANNEL, CONTROL] {
            sys::grant_port(port)?;
        }
        sys::write_port(CONTROL, START);
        sys::write_port(CHANNEL, 0);
        sys::write_port(CHANNEL, 0);
        Ok(Self {
            reading: Mutex::new(()),
        })
    }

    /// Reads the current count, which decreases.
    pub(crate) fn count(&self) -> u16 {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        sys::write_port(CONTROL, LATCH);
        let low = sys::read_port(CHANNEL);
        u16::from_le_bytes([low, sys::read_port(CHANNEL)])
    }
}

/// Returns the time between two counts. The second one must be less than 2^16 counts, or 54.9 ms, after the
/// first.
pub(crate) fn between(first: u16, second: u16) -> Duration {
    let counts = u64::from(first.wrapping_sub(second));
    Duration::from_nanos(counts * 1_000_000_000 / FREQUENCY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_go_down_and_begin_anew() {
        assert_eq!(between(5, 5), Duration::ZERO);
        // Counts for a hundredth of a second, with and without wrapping.
        for (first, second) in [(20_000, 8_068), (5_000, 58_604)] {
            let hundredth = between(first, second);
            let off = hundredth.abs_diff(Duration::from_millis(10));
            assert!(off < Duration::from_micros(1), "{hundredth:?}");
        }
    }
}
