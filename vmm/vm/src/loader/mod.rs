//! Loads a guest from files: the kernel, its command line and initramfs, and the boot parameters that point to
//! them.
//!
//! Kernels are entered through the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst). The ELF file in a
//! `bzImage` is unpacked on the host and entered directly. So the kernel's own decompressor never runs: [`place`]
//! chooses random addresses for the kernel, and [`Kernel::relocate`](hvprobe_vmlinux::Kernel::relocate) moves it
//! there. [`hvprobe_vmlinux`] has already checked the kernel.

mod boot;
mod error;
mod initrd;
mod placement;

pub use boot::{MAX_CMDLINE, load};
pub use error::LoadError;
pub use initrd::command_archive;
pub use placement::{RandomNumbers, Room, place};

#[cfg(test)]
mod tests;
