//! Loads a guest from files: the kernel image, its command line and initramfs, and the boot parameters that
//! point to them.
//!
//! Kernels are entered through the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst). A `bzImage`
//! is unpacked on the host and its ELF file entered directly, so the kernel's own decompressor never runs and
//! text stays at its link address. Images are untrusted input: every offset and size read from one is checked
//! before use, and unpacking stops at a fixed size.

mod boot;
mod bzimage;
mod elf;
mod error;
mod file;
mod initrd;
mod kernel;
mod kernel_error;
mod unpack;
mod xz;

pub use boot::{MAX_CMDLINE, load};
pub use error::LoadError;
pub use file::open as open_file;
pub use initrd::command_archive;
pub use kernel::Kernel;
pub use kernel_error::KernelError;

#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod tests;
