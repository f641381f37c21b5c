//! Devices on a guest's I/O port bus, and the ACPI tables that describe them.
//!
//! Invariant: a device knows neither KVM nor the machine it is in. Its creator passes what it needs of them,
//! such as an interrupt line or a range of memory.

pub mod acpi;
mod bus;
mod serial;

pub use bus::{DeviceEvent, Ports};
pub use serial::COM1_GSI;
