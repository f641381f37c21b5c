//! What a guest finds on its bus of I/O ports, and the tables that tell it so.
//!
//! Invariant: a device knows neither KVM nor the machine it is in. What it needs of them, such as an
//! interrupt line or a place in memory, it is given.

pub mod acpi;
mod bus;
mod serial;

pub use bus::{DeviceEvent, Ports};
pub use serial::COM1_GSI;
