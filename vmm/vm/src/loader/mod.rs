//! Loads a guest from files: the kernel, its command line and initramfs, and the boot parameters that point to
//! them.
//!
//! Kernels are entered through the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst). The ELF file in a
//! `bzImage` is unpacked on the host and entered directly. So the kernel's own decompressor never runs, and text
//! stays at its link address. [`hvprobe_vmlinux`] has already checked the kernel.

mod boot;
mod error;
mod initrd;

pub use boot::{MAX_CMDLINE, load};
pub use error::LoadError;
pub use initrd::command_archive;

#[cfg(test)]
mod tests;
