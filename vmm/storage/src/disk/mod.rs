//! The bytes of a disk, from a raw file, a qcow2 file or memory.
//!
//! Invariant: nothing here writes, and a file is read as the format that was stated, never as the one that its
//! content suggests.

mod format;
mod memory;
mod qcow2;
mod raw;
pub(crate) mod source;

pub use format::Format;
pub(crate) use memory::Memory;
pub(crate) use qcow2::Qcow2;
pub(crate) use raw::Raw;
