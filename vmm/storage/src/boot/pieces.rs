//! Finds the files that a boot entry names.

use super::entry::{Piece, place};
use super::volume::Volume;
use crate::error::FileError;
use crate::filesystem::resolve::{file, names};

/// Largest kernel image file, in bytes.
pub(super) const MAX_KERNEL: u64 = 1 << 30;
/// Largest initial ramdisk, in bytes.
pub(super) const MAX_INITRD: u64 = 3 << 30;

/// Returns the names in the folder `path` on `volume`; none if there is no such folder. Adds a note if it cannot be
/// read.
pub(super) fn listed(volume: &Volume, path: &str, notes: &mut Vec<String>) -> Vec<String> {
    match names(volume.tree.as_ref(), path) {
        Ok(names) => names,
        Err(FileError::NotFound | FileError::WrongKind(_)) => Vec::new(),
        Err(error) => {
            let place = place(volume.number);
            notes.push(format!("{path} on {place} was not read: {error}"));
            Vec::new()
        }
    }
}

/// Returns the file `path` on `volume`, which may have at most `limit` bytes, or why it cannot be used.
pub(super) fn find(volume: &Volume, path: &str, limit: u64) -> Result<Piece, String> {
    let failed = |error: FileError| format!("{path} on {}: {error}", place(volume.number));
    let (_, size) = file(volume.tree.as_ref(), path).map_err(failed)?;
    if size > limit {
        return Err(failed(FileError::TooLarge { size, limit }));
    }
    if size == 0 {
        return Err(format!("{path} on {} is empty", place(volume.number)));
    }
    Ok(Piece {
        partition: volume.number,
        path: path.to_owned(),
        size,
        section: None,
    })
}
