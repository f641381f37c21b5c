//! Loads a guest from files: the kernel, its command line and initramfs, and the boot parameters that point to
//! them.
//!
//! Kernels are entered through the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst). A `bzImage`
//! is unpacked on the host and its ELF file entered directly, so the kernel's own decompressor never runs and
//! text stays at its link address. What is loaded has been checked by [`hvprobe_vmlinux`].

mod boot;
mod error;
mod initrd;

pub use boot::{MAX_CMDLINE, load};
pub use error::LoadError;
pub use initrd::command_archive;

#[cfg(test)]
mod tests;
