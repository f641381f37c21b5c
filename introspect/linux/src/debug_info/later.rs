//! Parts of a file that are read when they are asked for first.
//!
//! What is kept true: a part is read once, so what was told of it stays as it was; and only within the file as long
//! as that was when it was opened. A file that is shorter by then is an error.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use gimli::SectionId;

use super::error::DebugError;

/// A section that is read whole.
#[derive(Debug)]
pub(super) struct Later {
    pub(super) id: SectionId,
    at: u64,
    pub(super) len: usize,
    bytes: OnceLock<Vec<u8>>,
}

impl Later {
    /// The one of `len` bytes at `at`.
    pub(super) fn new(id: SectionId, at: u64, len: usize) -> Self {
        Self {
            id,
            at,
            len,
            bytes: OnceLock::new(),
        }
    }

    /// One whose bytes are known.
    pub(super) fn known(id: SectionId, bytes: Vec<u8>) -> Self {
        Self {
            id,
            at: 0,
            len: bytes.len(),
            bytes: bytes.into(),
        }
    }

    /// Its bytes, if they were read.
    pub(super) fn read_already(&self) -> Option<&[u8]> {
        self.bytes.get().map(Vec::as_slice)
    }

    /// Its bytes, from `file` unless they were read.
    pub(super) fn read(&self, file: Option<&File>) -> Result<&[u8], DebugError> {
        let bytes = once(&self.bytes, || self.part(file, 0, self.len))?;
        Ok(bytes)
    }

    /// So many of its bytes, from `file`, which are not kept.
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

/// What is in `cell`, which `make` makes unless somebody did.
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
