//! The devices of a machine.
//!
//! | port | device |
//! |---|---|
//! | 0x60 | keyboard controller's data: zero |
//! | 0x64 | keyboard controller's commands: reset only |
//! | 0x70, 0x71 | CMOS: all zero, so no driver waits for its clock |
//! | 0xf4 | exit status of the guest's workload: the last byte written |
//! | 0x3f8-0x3ff | serial port COM1, the console |
//! | 0x600, 0x601 | ACPI sleep control and status |
//!
//! A write of one byte to a port of probes (`hvprobe_arch::trap`) never reaches the bus: the vCPU handles it. All
//! other ports, and all other accesses to those of probes, read as all ones and ignore writes, as on a bus without
//! a device there. So there is no PCI. Likewise, no device answers at memory addresses outside KVM's own interrupt
//! controllers.
//!
//! Any vCPU's thread may call any method at any time. The console has one lock, which is held while bytes are moved
//! or the output is closed.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;

use super::acpi::{AcpiError, Tables};
use super::address::Space;
use super::bus::{Bus, ClaimError};
use super::device::{Device, DeviceEvent};
use super::exit_status::ExitStatus;
use super::reset::Reset;
use super::serial::{Console, Output};
use super::sleep::Sleep;
use super::zeros::Zeros;

/// The devices of a machine, on their bus.
#[derive(Debug)]
pub struct Devices {
    all: Box<[Arc<dyn Device>]>,
    bus: Bus,
    console: Arc<Console>,
    status: Arc<ExitStatus>,
}

impl Devices {
    /// Creates the devices of a machine. `interrupt` sends an edge on the console's interrupt line. `output` gets
    /// what the guest prints on the console.
    ///
    /// # Errors
    /// When two devices claim the same addresses.
    pub fn new(
        interrupt: impl Fn() -> io::Result<()> + Send + 'static,
        output: Arc<dyn Output>,
    ) -> Result<Self, ClaimError> {
        let console = Arc::new(Console::new(Box::new(interrupt), output));
        let status = Arc::new(ExitStatus::new());
        let all: Box<[Arc<dyn Device>]> = Box::new([
            Arc::new(Sleep),
            Arc::clone(&console) as _,
            Arc::new(Reset),
            Arc::clone(&status) as _,
            Arc::new(Zeros),
        ]);
        let mut bus = Bus::default();
        for device in &all {
            bus.claim(device)?;
        }
        Ok(Self {
            all,
            bus,
            console,
            status,
        })
    }

    /// Writes the ACPI tables of the devices and of `cpus` vCPUs to `place`, where kernels look for the RSDP.
    /// Returns the address of the RSDP.
    ///
    /// # Errors
    /// When the tables do not fit.
    pub fn write_acpi(
        &self,
        ram: &impl PhysMemory,
        place: Range<Gpa>,
        cpus: u32,
    ) -> Result<Gpa, AcpiError> {
        let mut tables = Tables::new();
        for device in &self.all {
            device.describe(&mut tables);
        }
        tables.write(ram, place, cpus)
    }

    /// Handles a vCPU's write: one value, or several for a string instruction.
    pub fn write(&self, space: Space, at: u64, data: &[u8]) -> Option<DeviceEvent> {
        let (device, offset) = self.bus.find(space, at, data.len())?;
        device.write(offset, data)
    }

    /// Handles a vCPU's read: one value, or several for a string instruction.
    pub fn read(&self, space: Space, at: u64, data: &mut [u8]) {
        match self.bus.find(space, at, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Ends the devices' activity outside the guest. All vCPUs must have left the guest.
    pub fn stop(&self) {
        for device in &self.all {
            device.stop();
        }
    }

    /// Adds `bytes` to the console's input. The guest reads them at its own pace.
    ///
    /// Returns the number of bytes accepted. The input queue had no room for the rest; the caller retries
    /// later.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        self.console.input(bytes)
    }

    /// Returns the exit status that the guest wrote last; `None` if it has not written one.
    #[must_use]
    pub fn guest_status(&self) -> Option<u8> {
        self.status.get()
    }
}

#[cfg(test)]
mod tests;
