//! The bus of I/O ports.
//!
//! | port | device |
//! |---|---|
//! | 0x60, 0x64 | keyboard controller, reset command only |
//! | 0x70, 0x71 | CMOS: all zero, a value for which no clock driver waits |
//! | 0xf4 | exit status of the guest's workload: the last byte written |
//! | 0x3f8-0x3ff | serial port COM1, the console |
//! | 0x600, 0x601 | ACPI sleep control and status |
//!
//! All other ports read as all ones, as on a bus without a device there, and ignore writes. So there is no PCI.
//! Memory-mapped I/O outside KVM's own interrupt controllers is empty likewise.
//!
//! Any vCPU may call at any time. The console has one lock, held only while a byte moves.

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

use super::acpi;
use super::serial::{COM1, Console};

/// Port to which a guest writes its workload's exit status, one byte.
const EXIT_STATUS_PORT: u16 = 0xf4;

const COM1_LAST: u16 = COM1 + 7;
const KEYBOARD_DATA: u16 = 0x60;
const CMOS_INDEX: u16 = 0x70;
const CMOS_DATA: u16 = 0x71;

/// A guest's request to the machine, made by a port write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// Restart the machine.
    Reset,
    /// Power the machine off.
    Shutdown,
}

/// The devices at a machine's I/O ports.
#[derive(Debug)]
pub struct Ports {
    console: Console,
    /// The exit status, or [`Self::NO_STATUS`] if the guest has written none.
    status: AtomicU16,
}

impl Ports {
    const NO_STATUS: u16 = 0x100;

    /// Creates the devices of a machine. `interrupt` sends an edge on the console's interrupt line. `sink` gets
    /// the guest's console output; it is called on a vCPU's thread with the console locked, so it must not
    /// block nor call back.
    pub fn new(
        interrupt: impl Fn() -> io::Result<()> + Send + 'static,
        sink: impl FnMut(&[u8]) + Send + 'static,
    ) -> Self {
        Self {
            console: Console::new(Box::new(interrupt), Box::new(sink)),
            status: AtomicU16::new(Self::NO_STATUS),
        }
    }

    /// Handles a vCPU's write: one value, or several for a string instruction.
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

    /// Handles a vCPU's read: one value, or several for a string instruction.
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

    /// Adds `bytes` to the console's input. The guest reads them at its own pace.
    ///
    /// Returns the number of bytes accepted. The input queue had no room for the rest; the caller retries
    /// later.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        self.console.input(bytes)
    }

    /// Returns the exit status that the guest wrote last.
    #[must_use]
    pub fn guest_status(&self) -> Option<u8> {
        u8::try_from(self.status.load(Ordering::Relaxed)).ok()
    }
}

/// Returns whether a value of the sleep control register enters S5 (ACPI 6.5, 4.8.3.7).
fn is_soft_off(value: &u8) -> bool {
    value & acpi::SLEEP_ENABLE != 0 && value >> 2 & 7 == acpi::S5
}

#[cfg(test)]
mod tests;
