//! Runs detours natively, in this process. Their memory is below 2 GiB, so that 32 bits suffice for an address as
//! in a kernel, and they have a GS base of their own.
//!
//! - [`arena`]: the memory, with a function to be probed, a ring, instances, per-CPU data and a stack in it.
//! - [`mod@bench`]: runs a function with the registers and flags that a test sets, and returns their values
//!   afterwards.
//! - [`loads`]: code that loads from memory as a kernel's does.
//! - [`probed`]: plants detours.
//! - [`reader`]: takes records out of the ring.
//! - [`traps`]: handles int3s and doorbells as a host does.

pub mod arena;
pub mod bench;
pub mod loads;
pub mod probed;
pub mod reader;
pub mod traps;
