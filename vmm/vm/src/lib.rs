//! KVM without probes: guest memory, vCPUs, the loader, and the capabilities of this host.
//!
//! Invariant: this crate knows neither probes nor the internals of a Linux kernel. Where those need memory,
//! such as a region beside the guest's RAM, the caller that creates the machine passes its size.

mod catch_mode;
mod entry;
pub mod host;
mod layout;
pub mod loader;
pub mod memory;
pub mod vcpu;
mod vm;

pub use catch_mode::CatchMode;
pub use entry::Entry;
pub use layout::ACPI_TABLES;
pub use vm::{CpuError, check_count, create_vm, pulse};
