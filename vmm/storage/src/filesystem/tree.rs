//! What a file system is to its readers: a tree of files.

use crate::error::FileError;

/// Largest folder that is read, in bytes.
pub(crate) const MAX_FOLDER: u64 = 1 << 20;
/// Maximum number of names of a folder that are listed.
pub(crate) const MAX_NAMES: usize = 1 << 16;
/// Largest target of a symbolic link, in bytes, as in Linux.
pub(crate) const MAX_TARGET: u64 = 4096;

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Folder,
    Link,
    /// A device, a FIFO or a socket.
    Other,
}

/// What is known of a file without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) kind: Kind,
    /// Size in bytes.
    pub(crate) size: u64,
}

/// A file system. Paths begin with `/`, have no `.` and no `..`, and lead through no symbolic link; `/` is the
/// root. [`super::resolve::resolve`] makes such paths.
pub(crate) trait Tree {
    /// Describes the file at `path`, which may be a link.
    fn stat(&self, path: &str) -> Result<Stat, FileError>;

    /// Returns the target of the link at `path`.
    fn target(&self, path: &str) -> Result<String, FileError>;

    /// Returns the names in the folder at `path`, without `.` and `..`. Names that are not UTF-8 are left out.
    fn names(&self, path: &str) -> Result<Vec<String>, FileError>;

    /// Returns the `len` bytes from `offset` on of the file at `path`. Fails if it is shorter. The caller bounds
    /// `len`.
    fn bytes(&self, path: &str, offset: u64, len: u64) -> Result<Vec<u8>, FileError>;
}
