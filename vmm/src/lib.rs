//! The machine that hvprobe boots guests in: KVM, memory, virtual CPUs, devices and loader, the
//! probe engine's traits implemented on them, and the gRPC service that offers it all.
//!
//! Only this crate names KVM, and within it only [`api`] names the wire format.

pub mod api;
mod catch_mode;
pub mod devices;
pub mod entry;
pub mod host;
mod layout;
pub mod loader;
pub mod machine;
pub mod memory;
pub mod vcpu;
pub mod vm;

pub use catch_mode::CatchMode;
