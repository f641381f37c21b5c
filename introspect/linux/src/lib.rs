//! Reads a Linux kernel: its image, symbols and types, the tasks that run, the modules that are loaded, the
//! text that must not be touched, and the tables that unwind its stacks.
//!
//! Knows nothing about probes. Everything here is read from a file or from the guest's memory, and both are assumed
//! to be hostile: reads are checked, counts and lengths are limited, and layouts are compared with the guest.

mod bytes;
pub mod debug_info;
pub mod image;
pub mod modules;
mod notes;
pub mod symbols;
pub mod task;
pub mod types;
pub mod unwind;
