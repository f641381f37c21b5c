//! From files to a guest ready to run: the kernel image, its command line and initramfs, and the
//! boot parameters it finds them by.
//!
//! Kernels enter through the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst). A
//! `bzImage` is unpacked here on the host and its ELF entered directly, so the kernel's own
//! decompressor never runs and text stays at its link address. Images are untrusted input: every
//! offset and size read from one is checked before use, and unpacking stops at a fixed size.
//!
//! Guest memory below 1 MiB is laid out as follows; everything else is the kernel's.
//!
//! | from | what |
//! |---|---|
//! | 0x1000 | GDT |
//! | 0x7000 | boot parameters |
//! | 0x8ff0 | top of the entry stack |
//! | 0x9000 | page tables that map the first 4 GiB onto themselves, six pages |
//! | 0x20000 | command line |
//! | 0xe0000 | ACPI tables |
//! | 0xffff0 | what kernels jump to, in real mode, to reset a machine they know no better way for |

mod boot;
mod bzimage;
mod elf;
mod file;
mod initrd;
mod unpack;
mod xz;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hvprobe_arch::Gpa;

pub use boot::{Entry, MAX_CMDLINE, load};
pub(crate) use file::open as open_file;
pub use initrd::command_archive;

use bzimage::SetupHeader;

/// The largest kernel image file that is read.
const MAX_FILE: u64 = 1 << 30;

/// Where the loader puts what the entry state needs; see the module's table.
pub(crate) mod layout {
    use hvprobe_arch::Gpa;

    pub(crate) const GDT: Gpa = Gpa(0x1000);
    pub(crate) const BOOT_PARAMS: Gpa = Gpa(0x7000);
    pub(crate) const STACK: Gpa = Gpa(0x8ff0);
    pub(crate) const PAGE_TABLES: Gpa = Gpa(0x9000);
    pub(crate) const CMDLINE: Gpa = Gpa(0x2_0000);
    /// Where conventional memory ends and what firmware keeps begins.
    pub(crate) const FIRMWARE: Gpa = Gpa(0x9_fc00);
    /// Where ACPI tables lie, up to the reset vector: kernels look for the RSDP from here on.
    pub(crate) const ACPI: Gpa = Gpa(0xe_0000);
    /// Where execution of a PC's firmware begins, by its address below 1 MiB.
    pub(crate) const RESET_VECTOR: Gpa = Gpa(0xf_fff0);
    pub(crate) const HIGH: Gpa = Gpa(0x10_0000);
}

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
    #[error("the kernel's payload unpacks to more than {} MiB", unpack::MAX_KERNEL >> 20)]
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

/// A kernel image, unpacked.
#[derive(Debug)]
pub struct Kernel {
    elf: Vec<u8>,
    setup: Option<SetupHeader>,
}

impl Kernel {
    /// Reads the kernel image at `path`: an ELF `vmlinux` for x86-64, or a `bzImage` whose payload
    /// is plain or compressed with gzip, lz4, xz or zstd.
    ///
    /// # Errors
    /// When the file cannot be read, is no such image, or is damaged.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let read = |source| LoadError::Read {
            path: path.to_owned(),
            source,
        };
        let file = file::open(path).map_err(read)?;
        let mut bytes = Vec::new();
        if let Ok(metadata) = file.metadata() {
            let size = metadata.len().min(MAX_FILE);
            bytes.reserve_exact(usize::try_from(size).unwrap_or(0));
        }
        file.take(MAX_FILE + 1)
            .read_to_end(&mut bytes)
            .map_err(read)?;
        if bytes.len() as u64 > MAX_FILE {
            let path = path.to_owned();
            return Err(LoadError::FileTooLarge { path });
        }
        Self::parse(bytes)
    }

    /// Recognises and unpacks an image that has been read already.
    ///
    /// # Errors
    /// When it is no kernel image, or is damaged.
    pub fn parse(image: Vec<u8>) -> Result<Self, LoadError> {
        if image.is_empty() {
            return Err(LoadError::Empty);
        }
        let (elf, setup) = if image.starts_with(elf::MAGIC) {
            (image, None)
        } else if let Some(setup) = SetupHeader::find(&image)? {
            (unpack::unpack(setup.payload(&image)?)?, Some(setup))
        } else {
            return Err(foreign(&image));
        };
        elf::check(&elf)?;
        Ok(Self { elf, setup })
    }

    /// The kernel as an ELF file: the image itself, or what was packed in it.
    #[must_use]
    pub fn elf(&self) -> &[u8] {
        &self.elf
    }
}

/// What an image is that is neither of the two formats.
fn foreign(image: &[u8]) -> LoadError {
    let machine = |found: &str| LoadError::WrongMachine {
        found: found.to_owned(),
    };
    let found = if image.get(0x38..0x3c) == Some(b"ARM\x64") {
        return machine("arm64");
    } else if image.get(0x30..0x35) == Some(b"RISCV") || image.get(0x38..0x3c) == Some(b"RSC\x05") {
        return machine("riscv");
    } else if image.get(0x24..0x28) == Some(&[0x18, 0x28, 0x6f, 0x01]) {
        return machine("32-bit arm");
    } else if image.starts_with(b"MZ") {
        "a PE executable without a Linux boot header"
    } else if image.starts_with(&[0x1f, 0x8b]) {
        "a gzip file"
    } else if image.starts_with(b"070701") {
        "a cpio archive"
    } else if image.starts_with(b"!<arch>") {
        "an ar archive or Debian package"
    } else {
        "no known signature"
    };
    LoadError::NotAKernel { found }
}

#[cfg(test)]
mod tests;
