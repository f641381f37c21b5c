//! The KVM machine that hvprobe boots guests in.
pub mod acpi;
pub mod api;
pub mod cpu;
pub mod devices;
pub mod loader;
pub mod memory;
pub mod machine;
pub mod selfcheck;
pub use selfcheck::CatchMode;
pub mod microguest;
pub use hvprobe_introspect::definition;
