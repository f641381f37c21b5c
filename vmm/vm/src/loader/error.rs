//! Errors of loading a guest.

use std::io;

use hvprobe_arch::Gpa;
use hvprobe_vmlinux::KernelError;

/// Error of loading a guest.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel's file cannot be read.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The kernel does not fit into RAM.
    #[error(
        "the kernel needs memory up to {needed:#x}, but the machine's {memory_mib} MiB end at {end:#x}; give it more memory"
    )]
    KernelTooLarge {
        /// The address after the kernel's last byte.
        needed: u64,
        /// The RAM of the machine in MiB.
        memory_mib: u64,
        /// The address after the last byte of RAM that the kernel can use.
        end: u64,
    },
    /// The initramfs does not fit beside the kernel.
    #[error("the initrd of {} KiB is too large for {memory_mib} MiB of memory: {} KiB are free beside the kernel", size.div_ceil(1024), free / 1024)]
    InitrdTooLarge {
        /// The size of all archives together, in bytes.
        size: u64,
        /// The free memory beside the kernel, in bytes.
        free: u64,
        /// The RAM of the machine in MiB.
        memory_mib: u64,
    },
    /// The command line is longer than the kernel allows.
    #[error("the kernel command line has {len} bytes; at most {max} fit")]
    CmdlineTooLong {
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The command line contains a zero byte, at which it would end.
    #[error("the kernel command line contains a zero byte")]
    CmdlineZero,
    /// The guest's command cannot be packed.
    #[error("the command for the guest {0}")]
    Command(
        /// What is wrong with it.
        &'static str,
    ),
    /// The host returns no random numbers.
    #[error(
        "no random numbers for the kernel's addresses; `nokaslr` on its command line does without"
    )]
    NoRandomNumbers(
        /// The system's error.
        #[source]
        io::Error,
    ),
    /// The boot structures do not fit into RAM.
    #[error("no memory at {0} for boot structures")]
    NoMemory(
        /// Their guest physical address.
        Gpa,
    ),
}
