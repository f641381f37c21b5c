//! Reads the kernel image that the guest is booted from.
//!
//! A [`KernelImage`] is built once from the ELF file and never changes. Invariants: it owns all it needs (the
//! symbols, the text as it is loaded, the lists of text that must not be probed), so the file can be dropped. No byte
//! of the file is trusted: a hostile one gives an error or wrong names, never a panic or unbounded work.

mod elf;
mod error;
mod forbidden;
mod kallsyms;
mod kernel;
mod lists;
mod syscalls;
mod tables;
mod tasks;
#[cfg(test)]
mod tests;
mod unwind;

pub use error::{ImageError, KallsymsError};
pub use forbidden::{Area, Forbidden, Unknown};
pub(crate) use forbidden::{Lists, relative, words};
pub use kernel::KernelImage;
pub use syscalls::CallParameter;
pub use tasks::{TaskClues, TaskLayout};
