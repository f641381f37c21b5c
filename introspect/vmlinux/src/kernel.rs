//! The kernel image: detects which of the two formats a file has, and extracts its ELF file.

use std::io::Read as _;
use std::path::Path;

use hvprobe_arch::Gpa;

use super::bzimage::SetupHeader;
use super::elf::{self, Segment};
use super::error::{Immovable, KernelError, MAX_FILE};
use super::relocations::{Relocations, Slide};
use super::{file, unpack};

/// A kernel image, unpacked.
#[derive(Debug)]
pub struct Kernel {
    elf: Vec<u8>,
    setup: Option<SetupHeader>,
    slide: Option<Slide>,
}

impl Kernel {
    /// Reads the kernel image at `path`: an ELF `vmlinux` for x86-64, or a `bzImage` whose payload
    /// is plain or compressed with gzip, lz4, xz or zstd.
    ///
    /// # Errors
    /// When the file cannot be read, is not such an image, or is damaged.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        let read = |source| KernelError::Read {
            path: path.to_owned(),
            source,
        };
        let too_large = || KernelError::FileTooLarge {
            path: path.to_owned(),
        };
        let file = file::open(path).map_err(read)?;
        let mut bytes = Vec::new();
        if let Ok(metadata) = file.metadata() {
            if metadata.len() > MAX_FILE {
                return Err(too_large());
            }
            bytes.reserve_exact(usize::try_from(metadata.len()).unwrap_or(0));
        }
        // The file may grow meanwhile, and some file systems, such as procfs, do not report the length of a file.
        file.take(MAX_FILE + 1)
            .read_to_end(&mut bytes)
            .map_err(read)?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(too_large());
        }
        Self::parse(bytes)
    }

    /// Parses and unpacks an image that is in memory.
    ///
    /// # Errors
    /// When it is not a kernel image, or is damaged.
    pub fn parse(image: Vec<u8>) -> Result<Self, KernelError> {
        if image.is_empty() {
            return Err(KernelError::Empty);
        }
        let (elf, setup) = if image.starts_with(elf::MAGIC) {
            (image, None)
        } else if let Some(setup) = SetupHeader::find(&image)? {
            (unpack::unpack(setup.payload(&image)?)?, Some(setup))
        } else {
            return Err(foreign(&image));
        };
        elf::check(&elf)?;
        Ok(Self {
            elf,
            setup,
            slide: None,
        })
    }

    /// Moves the kernel by `slide` from the addresses at which it is linked. [`Kernel::elf`] is that of the moved
    /// kernel afterwards. A kernel can be moved once.
    ///
    /// # Errors
    /// When the kernel cannot be moved, as [`Kernel::movable`] says, or its relocations are damaged. After the
    /// latter, it cannot be used.
    pub fn relocate(&mut self, slide: Slide) -> Result<(), KernelError> {
        Relocations::find(&self.elf)?.apply(&mut self.elf, slide)?;
        elf::check(&self.elf)?;
        self.slide = Some(slide);
        Ok(())
    }

    /// Checks that the kernel can be moved.
    ///
    /// # Errors
    /// When its file has no relocations that are known.
    pub fn movable(&self) -> Result<(), Immovable> {
        Relocations::find(&self.elf).map(drop)
    }

    /// Returns how far the kernel was moved, if it was.
    #[must_use]
    pub fn slide(&self) -> Option<Slide> {
        self.slide
    }

    /// Returns the kernel as an ELF file: the image itself, or its unpacked payload. Relocations follow the ELF file
    /// if the kernel can be moved.
    #[must_use]
    pub fn elf(&self) -> &[u8] {
        &self.elf
    }

    /// Returns the setup header, if the image is a `bzImage`.
    #[must_use]
    pub fn setup(&self) -> Option<&SetupHeader> {
        self.setup.as_ref()
    }

    /// Returns the physical address of the entry point.
    ///
    /// # Errors
    /// When the ELF file is damaged.
    pub fn entry(&self) -> Result<Gpa, KernelError> {
        elf::entry(&self.elf)
    }

    /// Returns the segments to load, in the file's order. There is at least one; none is empty, none overlaps
    /// another, all end below 2^64, and one of them contains the entry point.
    ///
    /// # Errors
    /// When the ELF file is damaged.
    pub fn segments(&self) -> Result<Vec<Segment<'_>>, KernelError> {
        elf::segments(&self.elf)
    }
}

/// Returns the error for an image in neither of the two formats.
fn foreign(image: &[u8]) -> KernelError {
    let machine = |found: &str| KernelError::WrongMachine {
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
    KernelError::NotAKernel { found }
}
