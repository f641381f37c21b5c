//! What a guest finds on its bus of I/O ports, and the tables that tell it so.

pub mod acpi;
mod bus;
mod serial;

pub use bus::{DeviceEvent, EXIT_STATUS_PORT, Ports};
pub(crate) use serial::COM1_GSI;
