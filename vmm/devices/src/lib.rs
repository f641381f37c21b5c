//! Devices on a guest's bus, and the ACPI tables that describe them.
//!
//! Invariant: a device knows neither KVM nor the machine it is in. The creator of a device passes what the device
//! needs of them, such as an interrupt line or a range of memory.

mod acpi;
mod address;
mod bus;
mod device;
mod devices;
mod exit_status;
mod reset;
mod serial;
mod sleep;
mod zeros;

pub use acpi::AcpiError;
pub use address::Space;
pub use bus::ClaimError;
pub use device::DeviceEvent;
pub use devices::Devices;
pub use reset::{RESET_PORT, RESET_VALUE};
pub use serial::{COM1_GSI, Output};
