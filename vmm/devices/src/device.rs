//! The interface of a device.
//!
//! ```text
//!   made ──► claims its ranges ──► describes itself to the guest ──► reads and writes ──► stopped
//! ```
//! Invariant: a device knows neither KVM nor the machine it is in, nor other devices. The creator of a device
//! passes what the device needs of them, such as an interrupt line or a range of memory.

use std::fmt::Debug;

use super::acpi::Tables;
use super::address::AddressRange;

/// A guest's request to the machine, made by a write to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// Restart the machine.
    Reset,
    /// Power the machine off.
    Shutdown,
}

/// A device on the bus. The threads of several vCPUs may read and write it at the same time.
pub(crate) trait Device: Debug + Send + Sync {
    /// Returns the ranges of addresses at which the device answers.
    fn ranges(&self) -> Vec<AddressRange>;

    /// Adds the device to the tables by which the guest finds it. A device that every PC has at the same ports
    /// needs no entry.
    fn describe(&self, _tables: &mut Tables) {}

    /// Handles a read at `offset` from the start of one of the ranges. `data` has several values if a string
    /// instruction reads a port.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Handles a write at `offset` from the start of one of the ranges. `data` has several values if a string
    /// instruction writes to a port.
    fn write(&self, offset: u64, data: &[u8]) -> Option<DeviceEvent>;

    /// Ends the device's activity outside the guest. Called once, after the last vCPU has left the guest.
    fn stop(&self) {}
}
