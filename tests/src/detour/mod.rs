//! Detours run for real, in this very process: in memory below 2 GiB, where 32 bits tell addresses
//! as they do in a kernel, and with a GS base of their own.
//!
//! - [`arena`]: the memory, with a function to be probed, a ring, instances, per-CPU data and a
//!   stack in it.
//! - [`bench`]: runs a function with every register and flag as a test wants them, and tells what
//!   they are afterwards.
//! - [`loads`]: code that loads from memory as a kernel's does.
//! - [`probed`]: puts detours in place.
//! - [`reader`]: takes records out of the ring.
//! - [`traps`]: what a host does about int3s and doorbells.

pub mod arena;
pub mod bench;
pub mod loads;
pub mod probed;
pub mod reader;
pub mod traps;
