//! The ACPI sleep control and status registers (ACPI 6.5, 4.8.3.7), by which a guest powers itself off.

use acpi_tables::aml::{Name, Package, ZERO};

use super::acpi::Tables;
use super::address::AddressRange;
use super::device::{Device, DeviceEvent};

/// Port of the sleep control register.
const SLEEP_CONTROL: u16 = 0x600;
/// Port of the sleep status register.
const SLEEP_STATUS: u16 = 0x601;
/// Value of bits 4:2 of the sleep control register for S5, "soft off".
const S5: u8 = 5;
/// Bit of the sleep control register that enters the state in bits 4:2.
const SLEEP_ENABLE: u8 = 1 << 5;

/// Offset of the sleep control register.
const CONTROL: u64 = 0;

#[derive(Debug)]
pub(crate) struct Sleep;

impl Device for Sleep {
    fn ranges(&self) -> Vec<AddressRange> {
        vec![AddressRange::ports(SLEEP_CONTROL, 2)]
    }

    fn describe(&self, tables: &mut Tables) {
        tables.set_sleep(SLEEP_CONTROL, SLEEP_STATUS);
        let soft_off = Package::new(vec![&S5, &ZERO, &ZERO, &ZERO]);
        tables.add(&Name::new("_S5_".into(), &soft_off));
    }

    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<DeviceEvent> {
        let is_off = offset == CONTROL && data.iter().any(is_soft_off);
        is_off.then_some(DeviceEvent::Shutdown)
    }
}

/// Returns whether a value of the sleep control register enters S5.
fn is_soft_off(value: &u8) -> bool {
    value & SLEEP_ENABLE != 0 && value >> 2 & 7 == S5
}
