//! The second channel of the machine's interval timer: a clock that goes on whatever becomes of the processor's
//! counter, as KVM works it out from its own host's time when it is read (`pit_get_count` in arch/x86/kvm/i8254.c).
//!
//! Stock kernels leave that channel, which is the loudspeaker's, alone.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::sys;

const CHANNEL: u16 = 0x42;
const CONTROL: u16 = 0x43;
/// Channel 2 counts down from 2^16 again and again (mode 2), and is read and written low byte first.
const START: u8 = 0xb4;
/// Channel 2 keeps its count for the next two reads.
const LATCH: u8 = 0x80;
/// How often it counts in a second.
const FREQUENCY: u64 = 1_193_182;

/// The timer, running.
#[derive(Debug)]
pub(crate) struct Pit {
    /// Held from the latch to the second byte.
    reading: Mutex<()>,
}

impl Pit {
    /// Starts it, and lets this thread and those that it starts read it.
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

    /// What it has counted down to.
    pub(crate) fn count(&self) -> u16 {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        sys::write_port(CONTROL, LATCH);
        let low = sys::read_port(CHANNEL);
        u16::from_le_bytes([low, sys::read_port(CHANNEL)])
    }
}

/// The time between two counts, the second less than 2^16 counts, or 54.9 ms, after the first.
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
        // Counts of a hundredth of a second, over the end and not.
        for (first, second) in [(20_000, 8_068), (5_000, 58_604)] {
            let hundredth = between(first, second);
            let off = hundredth.abs_diff(Duration::from_millis(10));
            assert!(off < Duration::from_micros(1), "{hundredth:?}");
        }
    }
}
