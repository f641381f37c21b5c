//! The keyboard controller's command port, of which only the reset command works.

use super::acpi::Tables;
use super::address::AddressRange;
use super::device::{Device, DeviceEvent};

/// Port at which [`RESET_VALUE`] resets the machine: the keyboard controller's command port. Programs without ACPI
/// also use it.
pub const RESET_PORT: u16 = 0x64;
/// The keyboard controller's command to pulse the reset line.
pub const RESET_VALUE: u8 = 0xfe;

#[derive(Debug)]
pub(crate) struct Reset;

impl Device for Reset {
    fn ranges(&self) -> Vec<AddressRange> {
        vec![AddressRange::ports(RESET_PORT, 1)]
    }

    fn describe(&self, tables: &mut Tables) {
        tables.set_reset(RESET_PORT, RESET_VALUE);
    }

    /// Reads as zero, the status of a controller that is ready.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Option<DeviceEvent> {
        data.contains(&RESET_VALUE).then_some(DeviceEvent::Reset)
    }
}
