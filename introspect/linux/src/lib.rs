//! What a Linux kernel tells: its image, symbols and types, the tasks that run and the modules that are
//! loaded, what of its text must not be touched, and how its stacks are followed.
//!
//! Knows no probes. Everything here is read from a file or from the guest's memory, and both are
//! taken to be hostile: a read is checked, a claim is bounded, a layout is held against the guest.

mod bytes;
pub mod debug_info;
pub mod image;
pub mod modules;
mod notes;
pub mod symbols;
pub mod task;
pub mod types;
pub mod unwind;
