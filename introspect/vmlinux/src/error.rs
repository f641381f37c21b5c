//! Errors of reading a kernel's file, and the size limits.

use std::io;
use std::path::PathBuf;

/// Largest kernel image file, in bytes.
pub(super) const MAX_FILE: u64 = 1 << 30;

/// Largest unpacked kernel, in bytes.
pub(super) const MAX_KERNEL: u64 = 512 << 20;

/// Error of reading a kernel's file.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
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
    /// The kernel cannot be moved.
    #[error("the kernel cannot be moved to another address: {0}")]
    Immovable(#[from] Immovable),
}

/// Why a kernel cannot be moved to other addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Immovable {
    /// There is nothing after the kernel's ELF file: it is a `vmlinux`, or was built without
    /// `CONFIG_X86_NEED_RELOCS`.
    #[error("its file has no relocations")]
    NoRelocations,
    /// What is after the kernel's ELF file are not the relocations of any known kernel.
    #[error("its relocations have an unknown form")]
    Unknown,
    /// The ELF file has a table of symbols, which relocations do not move. The payload of a `bzImage` has none.
    #[error("its file has a symbol table")]
    HasSymbols,
    /// The header asks for an alignment that no kernel has.
    #[error("its header asks for addresses that are multiples of {0:#x}")]
    Alignment(
        /// The alignment in bytes.
        u64,
    ),
    /// The kernel fills its mapping.
    #[error("it is too large")]
    TooLarge,
}
