//! The probe engine: what the kernel image says, which probes are registered, how each is planted,
//! and what a hit does. It reaches guest memory and stops virtual CPUs only through traits
//! ([`world`]), so it runs, and is tested, without KVM.

pub mod hidden;
pub mod probe;
#[cfg(test)]
mod testing;
pub mod world;
