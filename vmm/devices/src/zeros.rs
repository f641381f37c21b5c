//! Ports that read as zero: the keyboard controller's data port, and those of the CMOS. A driver of the CMOS clock
//! does not wait when it reads zero, because zero means that no update of the clock is in progress.

use super::address::AddressRange;
use super::device::{Device, DeviceEvent};

const KEYBOARD_DATA: u16 = 0x60;
/// The CMOS has an index and a data port.
const CMOS: u16 = 0x70;

#[derive(Debug)]
pub(crate) struct Zeros;

impl Device for Zeros {
    fn ranges(&self) -> Vec<AddressRange> {
        vec![
            AddressRange::ports(KEYBOARD_DATA, 1),
            AddressRange::ports(CMOS, 2),
        ]
    }

    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) -> Option<DeviceEvent> {
        None
    }
}
