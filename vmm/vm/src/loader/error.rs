//! Errors of loading a guest, and the size limits.

use std::io;
use std::path::PathBuf;

use hvprobe_arch::Gpa;

/// Largest kernel image file, in bytes.
pub(super) const MAX_FILE: u64 = 1 << 30;

/// Largest unpacked kernel, in bytes.
pub(super) const MAX_KERNEL: u64 = 512 << 20;

/// Error of loading a guest.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel image cannot be read.
    #[error("cannot read the kernel image {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file is larger than any kernel.
    #[error("the kernel image {} is larger than {} MiB", path.display(), MAX_FILE >> 20)]
    FileTooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file is empty.
    #[error("the kernel image is empty")]
    Empty,
    /// The file has neither of the two bootable formats.
    #[error("not a kernel image: {found}; expected an x86-64 vmlinux (ELF) or bzImage")]
    NotAKernel {
        /// The format that it seems to have.
        found: &'static str,
    },
    /// The kernel is for another machine.
    #[error("the kernel image is for {found}, not for x86-64")]
    WrongMachine {
        /// The machine it is for.
        found: String,
    },
    /// The image ends too early or contradicts itself.
    #[error("the kernel image is damaged: {what}")]
    Damaged {
        /// What is wrong.
        what: String,
    },
    /// The bzImage has a boot protocol older than 2.08, and cannot be unpacked from outside.
    #[error("the bzImage has boot protocol {}.{:02}; 2.08 or newer is needed", .0 >> 8, .0 & 0xff)]
    OldProtocol(
        /// The version in the header's form: major in the high byte.
        u16,
    ),
    /// The payload has a format that is not supported.
    #[error(
        "the bzImage is compressed with {0}, which is not supported; gzip, lz4, xz and zstd are"
    )]
    Compression(
        /// The format, or a note that it is unknown.
        &'static str,
    ),
    /// The payload cannot be unpacked.
    #[error("cannot unpack the kernel's {format} payload")]
    Unpack {
        /// The format.
        format: &'static str,
        /// The decoder's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The payload unpacks to more than any kernel.
    #[error("the kernel's payload unpacks to more than {} MiB", MAX_KERNEL >> 20)]
    UnpackedTooLarge,
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
        /// The size of all its parts, in bytes.
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
    /// The boot structures do not fit into RAM.
    #[error("no memory at {0} for boot structures")]
    NoMemory(
        /// Their guest physical address.
        Gpa,
    ),
}
