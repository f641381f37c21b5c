//! Raw image files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::source::Source;

/// A raw image file.
#[derive(Debug)]
pub(crate) struct Raw {
    file: File,
    len: u64,
}

impl Raw {
    /// Opens the regular file at `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = hvprobe_vmlinux::open_file(path)?;
        let len = file.metadata()?.len();
        Ok(Self { file, len })
    }
}

impl Source for Raw {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}
