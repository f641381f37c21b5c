//! Why a guest could not be loaded, and the sizes that are too large for it.

use std::io;
use std::path::PathBuf;

use hvprobe_arch::Gpa;

/// The largest kernel image file that is read.
pub(super) const MAX_FILE: u64 = 1 << 30;

/// The largest kernel that is unpacked, in bytes.
pub(super) const MAX_KERNEL: u64 = 512 << 20;

/// Why a guest could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel's file cannot be read.
    #[error("cannot read the kernel image {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Larger than any kernel.
    #[error("the kernel image {} is larger than {} MiB", path.display(), MAX_FILE >> 20)]
    FileTooLarge {
        /// The file.
        path: PathBuf,
    },
    /// Nothing in it.
    #[error("the kernel image is empty")]
    Empty,
    /// Neither of the formats that can be booted.
    #[error("not a kernel image: {found}; expected an x86-64 vmlinux (ELF) or bzImage")]
    NotAKernel {
        /// What it looks like.
        found: &'static str,
    },
    /// A kernel for another machine.
    #[error("the kernel image is for {found}, not for x86-64")]
    WrongMachine {
        /// The machine it is for.
        found: String,
    },
    /// An image that ends before something it promises, or contradicts itself.
    #[error("the kernel image is damaged: {what}")]
    Damaged {
        /// What is wrong.
        what: String,
    },
    /// A bzImage from before boot protocol 2.08, which cannot be unpacked from outside.
    #[error("the bzImage has boot protocol {}.{:02}; 2.08 or newer is needed", .0 >> 8, .0 & 0xff)]
    OldProtocol(
        /// The version as the header has it: major in the high byte.
        u16,
    ),
    /// A payload in a format this program does not unpack.
    #[error(
        "the bzImage is compressed with {0}, which is not supported; gzip, lz4, xz and zstd are"
    )]
    Compression(
        /// The format, or that it is unknown.
        &'static str,
    ),
    /// The payload cannot be unpacked.
    #[error("cannot unpack the kernel's {format} payload")]
    Unpack {
        /// The format.
        format: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The payload grows beyond any kernel.
    #[error("the kernel's payload unpacks to more than {} MiB", MAX_KERNEL >> 20)]
    UnpackedTooLarge,
    /// The kernel does not fit.
    #[error(
        "the kernel needs memory up to {needed:#x}, but the machine's {memory_mib} MiB end at {end:#x}; give it more memory"
    )]
    KernelTooLarge {
        /// The address after the kernel's last byte.
        needed: u64,
        /// The RAM of the machine in MiB.
        memory_mib: u64,
        /// The address after the last byte of RAM the kernel can be in.
        end: u64,
    },
    /// The initramfs does not fit beside the kernel.
    #[error("the initrd of {} KiB is too large for {memory_mib} MiB of memory: {} KiB are free beside the kernel", size.div_ceil(1024), free / 1024)]
    InitrdTooLarge {
        /// The size of all its parts, in bytes.
        size: u64,
        /// The room there is, in bytes.
        free: u64,
        /// The RAM of the machine in MiB.
        memory_mib: u64,
    },
    /// The command line is longer than the kernel takes.
    #[error("the kernel command line has {len} bytes; at most {max} fit")]
    CmdlineTooLong {
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The command line would end early.
    #[error("the kernel command line contains a zero byte")]
    CmdlineZero,
    /// The guest's command cannot be packed.
    #[error("the command for the guest {0}")]
    Command(
        /// What is wrong with it.
        &'static str,
    ),
    /// The loader's own layout does not fit the memory.
    #[error("no memory at {0} for boot structures")]
    NoMemory(
        /// Where.
        Gpa,
    ),
}
