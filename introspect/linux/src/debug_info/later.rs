//! Sections of a file that are read when they are first needed.
//!
//! Invariants: a section that is read as a whole is read once and kept, so answers from it stay the same. Reads
//! stay within the length that the file had when it was opened; if the file has become shorter since, reading is an
//! error.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use gimli::SectionId;

use super::error::DebugError;

/// A section that can be read as a whole or in parts, from a file or from bytes in memory.
#[derive(Debug)]
pub(super) struct Later {
    pub(super) id: SectionId,
    at: u64,
    pub(super) len: usize,
    bytes: OnceLock<Vec<u8>>,
}

impl Later {
    /// Describes the section of `len` bytes at offset `at` of the file, without reading it.
    pub(super) fn new(id: SectionId, at: u64, len: usize) -> Self {
        Self {
            id,
            at,
            len,
            bytes: OnceLock::new(),
        }
    }

    /// Creates the section from `bytes`, which have already been read.
    pub(super) fn known(id: SectionId, bytes: Vec<u8>) -> Self {
        Self {
            id,
            at: 0,
            len: bytes.len(),
            bytes: bytes.into(),
        }
    }

    /// Returns all bytes of the section; `None` if they have not been read yet.
    pub(super) fn read_already(&self) -> Option<&[u8]> {
        self.bytes.get().map(Vec::as_slice)
    }

    /// Returns all bytes of the section. The first call reads them from `file`.
    pub(super) fn read(&self, file: Option<&File>) -> Result<&[u8], DebugError> {
        let bytes = once(&self.bytes, || self.part(file, 0, self.len))?;
        Ok(bytes)
    }

    /// Reads `len` bytes from offset `from` of the section, without keeping them.
    pub(super) fn part(
        &self,
        file: Option<&File>,
        from: usize,
        len: usize,
    ) -> Result<Vec<u8>, DebugError> {
        let is_within = from.checked_add(len).is_some_and(|end| end <= self.len);
        let at = u64::try_from(from).ok();
        let at = at.and_then(|from| self.at.checked_add(from));
        let (Some(file), Some(at), true) = (file, at, is_within) else {
            return Err(DebugError::Cut(self.id.name()));
        };
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at)
            .map_err(DebugError::Read)?;
        Ok(bytes)
    }
}

/// Returns the value in `cell`. If the cell is empty, fills it with the value that `make` returns.
pub(super) fn once<T>(
    cell: &OnceLock<T>,
    make: impl FnOnce() -> Result<T, DebugError>,
) -> Result<&T, DebugError> {
    match cell.get() {
        Some(made) => Ok(made),
        None => {
            let made = make()?;
            Ok(cell.get_or_init(|| made))
        }
    }
}
