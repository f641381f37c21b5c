//! The bus of I/O ports.
//!
//! | port | device |
//! |---|---|
//! | 0x60, 0x64 | keyboard controller, of which only the reset command is there |
//! | 0x70, 0x71 | CMOS: all zero, which no clock driver waits for |
//! | 0xf4 | exit status: the last byte written is what the guest's workload ended with |
//! | 0x3f8-0x3ff | serial port COM1, the console |
//! | 0x600, 0x601 | ACPI sleep control and status |
//!
//! Everything else reads as all ones, as on a bus where nobody answers, and ignores writes; so there
//! is no PCI. Memory-mapped I/O outside KVM's own interrupt controllers is likewise empty.
//!
//! Any vCPU may call at any time. The console is behind one lock, held only while a byte moves.

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

use super::acpi;
use super::serial::{COM1, Console};

/// The port a guest writes its workload's exit status to, one byte.
const EXIT_STATUS_PORT: u16 = 0xf4;

const COM1_LAST: u16 = COM1 + 7;
const KEYBOARD_DATA: u16 = 0x60;
const CMOS_INDEX: u16 = 0x70;
const CMOS_DATA: u16 = 0x71;

/// What a guest asked of the machine by writing to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// To start again.
    Reset,
    /// To switch off.
    Shutdown,
}

/// The devices behind a machine's I/O ports.
#[derive(Debug)]
pub struct Ports {
    console: Console,
    /// The exit status, or [`Self::NO_STATUS`].
    status: AtomicU16,
}

impl Ports {
    const NO_STATUS: u16 = 0x100;

    /// The devices of a machine. `interrupt` sends an edge down the console's interrupt line. What
    /// the guest writes to the console goes to `sink`, which is called on a vCPU's thread with the
    /// console locked: it must not block, nor call back.
    pub fn new(
        interrupt: impl Fn() -> io::Result<()> + Send + 'static,
        sink: impl FnMut(&[u8]) + Send + 'static,
    ) -> Self {
        Self {
            console: Console::new(Box::new(interrupt), Box::new(sink)),
            status: AtomicU16::new(Self::NO_STATUS),
        }
    }

    /// Takes what a vCPU wrote: one value, or for string instructions several of them.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<DeviceEvent> {
        match port {
            COM1..=COM1_LAST => self.console.write(port - COM1, data),
            acpi::RESET if data.contains(&acpi::RESET_VALUE) => return Some(DeviceEvent::Reset),
            acpi::SLEEP_CONTROL if data.iter().any(is_soft_off) => {
                return Some(DeviceEvent::Shutdown);
            }
            EXIT_STATUS_PORT => {
                if let Some(status) = data.last() {
                    self.status.store((*status).into(), Ordering::Relaxed);
                }
            }
            _ => {}
        }
        None
    }

    /// Fills in what a vCPU reads: one value, or for string instructions several of them.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        match port {
            COM1..=COM1_LAST => self.console.read(port - COM1, data),
            KEYBOARD_DATA
            | acpi::RESET
            | CMOS_INDEX
            | CMOS_DATA
            | acpi::SLEEP_CONTROL
            | acpi::SLEEP_STATUS => data.fill(0),
            _ => data.fill(0xff),
        }
    }

    /// Types `bytes` at the console. The guest takes them at its own pace.
    ///
    /// Returns how many were accepted; the rest found the input queue full and should come again
    /// later.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        self.console.input(bytes)
    }

    /// The exit status that the guest wrote last.
    #[must_use]
    pub fn guest_status(&self) -> Option<u8> {
        u8::try_from(self.status.load(Ordering::Relaxed)).ok()
    }
}

/// Whether a value of the sleep control register enters S5 (ACPI 6.5, 4.8.3.7).
fn is_soft_off(value: &u8) -> bool {
    value & acpi::SLEEP_ENABLE != 0 && value >> 2 & 7 == acpi::S5
}

#[cfg(test)]
mod tests;
