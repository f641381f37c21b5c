//! Keeps indexes of debug information in files, so that an index need not be built again.
//!
//! ```text
//!   BUILD-ID.index: ┌─────────────────────┬───────┐
//!                   │ CRC-32 of the index │ index │
//!                   └─────────────────────┴───────┘
//! ```
//! Invariants: a file is complete or absent, and deleting it loses nothing but time. Neither a damaged index
//! nor a failure to keep one prevents an answer.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use hvprobe_linux::debug_info::{DebugFile, Index};
use hvprobe_proto::limits;
use hvprobe_spec::language::text::hex;
use tempfile::NamedTempFile;
use tracing::debug;

/// Maximum length of an index to read, in bytes. The index of a distribution's kernel has a few million.
const LONGEST: u64 = 256 << 20;
/// Maximum length, in bytes, of debug information for which no index is kept: reading it all is faster than finding
/// an index.
const SHORT: usize = 1 << 20;

/// A folder of indexes.
#[derive(Clone, Debug)]
pub struct Indexes {
    folder: PathBuf,
    /// Debug information up to this length, in bytes, gets no index.
    short: usize,
}

impl Indexes {
    /// Creates a store of indexes in `folder`. The folder itself is created when an index is kept.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        let short = SHORT;
        Self { folder, short }
    }

    /// Loads the kept index of `file` into `file`. Returns false if there is none, or if it cannot be used.
    pub(crate) fn find(&self, file: &DebugFile) -> bool {
        let Some(path) = self.path(file) else {
            return false;
        };
        let index = match read(&path) {
            Ok(index) => file.read_index(&index),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                debug!(path = %path.display(), %error, "cannot read an index");
                None
            }
        };
        let is_there = index.is_some();
        if let Some(index) = index {
            file.adopt(Arc::new(index));
        }
        is_there
    }

    /// Writes `index`, the index of `file`, to the folder. A failure is only logged.
    pub(crate) fn keep(&self, file: &DebugFile, index: &Index) {
        let Some(path) = self.path(file) else {
            return;
        };
        let bytes = index.to_bytes();
        let write = || {
            fs::create_dir_all(&self.folder)?;
            let mut file = NamedTempFile::new_in(&self.folder)?;
            file.write_all(&crc32fast::hash(&bytes).to_le_bytes())?;
            file.write_all(&bytes)?;
            file.persist(&path).map_err(io::Error::from)
        };
        if let Err(error) = write() {
            debug!(path = %path.display(), %error, "cannot keep an index");
        }
    }

    /// Returns the path of the index of `file`; `None` if the file gets no index.
    fn path(&self, file: &DebugFile) -> Option<PathBuf> {
        let build_id = file.build_id()?;
        let is_wanted =
            file.length() > self.short && (1..=limits::BUILD_ID).contains(&build_id.len());
        is_wanted.then(|| self.folder.join(format!("{}.index", hex(build_id))))
    }
}

/// Reads the index in the file at `path`.
fn read(path: &PathBuf) -> io::Result<Vec<u8>> {
    // Opening a pipe would block.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut sum = [0; 4];
    let mut bytes = Vec::new();
    let mut file = File::open(path)?;
    file.read_exact(&mut sum)?;
    file.take(LONGEST).read_to_end(&mut bytes)?;
    match u32::from_le_bytes(sum) == crc32fast::hash(&bytes) {
        true => Ok(bytes),
        false => Err(io::Error::other("it is damaged")),
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_fixtures::dwarf;
    use tempfile::TempDir;

    use super::*;

    fn opened() -> DebugFile {
        DebugFile::parse(&dwarf::file()).unwrap()
    }

    /// Creates a store of indexes in `folder` that also keeps those of short files.
    fn indexes(folder: &TempDir) -> Indexes {
        Indexes {
            folder: folder.path().join("made/when/needed"),
            short: 0,
        }
    }

    #[test]
    fn an_index_is_found_again_until_it_is_damaged() {
        let folder = TempDir::new().unwrap();
        let indexes = indexes(&folder);
        let file = opened();
        assert!(!indexes.find(&file));
        indexes.keep(&file, file.index().unwrap());
        let again = opened();
        assert!(indexes.find(&again));
        assert_eq!(again.index().unwrap(), file.index().unwrap());
        let path = indexes.path(&file).unwrap();
        let whole = fs::read(&path).unwrap();
        for (at, end) in [(0, whole.len()), (9, whole.len()), (0, 3), (0, 0)] {
            let mut damaged = whole[..end].to_vec();
            if let Some(byte) = damaged.get_mut(at) {
                *byte ^= 1;
            }
            fs::write(&path, &damaged).unwrap();
            assert!(!indexes.find(&opened()), "{at} {end}");
        }
        // A new index replaces the damaged one.
        indexes.keep(&file, file.index().unwrap());
        assert!(indexes.find(&opened()));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_kept_is_in_nobodys_way() {
        let folder = TempDir::new().unwrap();
        let indexes = indexes(&folder);
        fs::write(folder.path().join("made"), "a file").unwrap();
        let file = opened();
        assert!(!indexes.find(&file));
        indexes.keep(&file, file.index().unwrap());
        assert!(!indexes.find(&file));
    }

    #[test]
    fn short_files_have_none() {
        let folder = TempDir::new().unwrap();
        let file = opened();
        Indexes::new(folder.path().into()).keep(&file, file.index().unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
