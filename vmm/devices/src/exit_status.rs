//! The port to which a guest writes the exit status of its workload, as one byte.

use std::sync::atomic::{AtomicU16, Ordering};

use super::address::AddressRange;
use super::device::{Device, DeviceEvent};

pub(crate) const EXIT_STATUS_PORT: u16 = 0xf4;

/// The exit status: the last byte written, or [`Self::NONE`].
#[derive(Debug)]
pub(crate) struct ExitStatus(AtomicU16);

impl ExitStatus {
    const NONE: u16 = 0x100;

    pub(crate) fn new() -> Self {
        Self(AtomicU16::new(Self::NONE))
    }

    /// Returns the status that the guest wrote last; `None` if it has not written one.
    pub(crate) fn get(&self) -> Option<u8> {
        u8::try_from(self.0.load(Ordering::Relaxed)).ok()
    }
}

impl Device for ExitStatus {
    fn ranges(&self) -> Vec<AddressRange> {
        vec![AddressRange::ports(EXIT_STATUS_PORT, 1)]
    }

    /// Fills `data` with ones, because the port can only be written.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Option<DeviceEvent> {
        if let Some(status) = data.last() {
            self.0.store((*status).into(), Ordering::Relaxed);
        }
        None
    }
}
