//! The machine that hvprobe boots guests in: KVM, memory, virtual CPUs, devices and loader, the
//! probe engine's traits implemented on them, and the gRPC service that offers it all.
//!
//! Only this crate names KVM, and within it only [`api`] names the wire format.

pub mod api;
pub mod cpu;
pub mod devices;
pub mod entry;
mod layout;
pub mod loader;
pub mod machine;
pub mod memory;
pub mod microguest;
pub mod selfcheck;

pub use selfcheck::CatchMode;
