//! KVM without probes: memory, virtual CPUs, the loader, and what this host can do.
//!
//! Invariant: nothing here knows a probe or what a Linux kernel has inside. Where that needs room, such
//! as a region beside the guest's RAM, whoever makes the machine says how much.

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
