//! Reads the file of a kernel: an ELF `vmlinux`, or a `bzImage`, which is unpacked to one, and which can be moved to
//! other addresses.
//!
//! Invariant: images are untrusted input. Every offset and size read from one is checked before use, and
//! unpacking stops at a fixed size. Nothing here knows symbols, guest memory or KVM: a machine without probes
//! boots these files, and a client without a machine reads them.

mod bzimage;
mod elf;
mod error;
mod file;
mod kernel;
mod relocations;
mod unpack;
mod xz;

pub use bzimage::SetupHeader;
pub use elf::Segment;
pub use error::{Immovable, KernelError};
pub use file::open as open_file;
pub use kernel::Kernel;
pub use relocations::Slide;

#[cfg(test)]
mod tests;
