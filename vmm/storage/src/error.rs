//! Errors of reading a disk image, and of reading a file in one.

use std::io;
use std::path::PathBuf;

/// Error of reading a disk image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The image cannot be opened.
    #[error("cannot open the disk image {}", path.display())]
    Open {
        /// The image.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The image refers to another file, which is not opened.
    #[error("the disk image {} needs {needs}: {why}", path.display())]
    Needs {
        /// The image that refers to the file.
        path: PathBuf,
        /// Role and name of the file.
        needs: String,
        /// Why it is not opened, and what to do.
        why: String,
    },
    /// Bytes of the image cannot be read.
    #[error("cannot read the disk image")]
    Read(#[source] io::Error),
    /// The partition table contradicts itself.
    #[error("the partition table of the disk image is damaged: {0}")]
    Table(String),
    /// A file in the image cannot be read.
    #[error("cannot read {path} on {place} of the disk image")]
    File {
        /// The partition, or the whole disk.
        place: String,
        /// Path in its file system.
        path: String,
        /// The cause.
        source: FileError,
    },
    /// There is nothing that can be booted.
    #[error("found nothing to boot in the disk image: {why}; give --kernel and --initrd")]
    NothingToBoot {
        /// What was found instead.
        why: String,
    },
}

/// Error of reading a file system in the image.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// There is no such file.
    #[error("there is no such file")]
    NotFound,
    /// The path leads to something else than is needed, such as a folder.
    #[error("it is not a {0}")]
    WrongKind(
        /// What is needed.
        &'static str,
    ),
    /// The path has too many symbolic links, or is too long.
    #[error("its path has too many symbolic links or parts")]
    TooDeep,
    /// The file or folder is larger than any that is plausible there.
    #[error("it has {size} bytes, and at most {limit} are read")]
    TooLarge {
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The file system contradicts itself.
    #[error("the file system is damaged: {0}")]
    Damaged(
        /// What is wrong.
        String,
    ),
    /// The file system has a feature that is not supported.
    #[error("the file system cannot be read on the host: {0}")]
    Unsupported(
        /// The feature.
        String,
    ),
    /// The file system leads the reader in circles.
    #[error("the file system is damaged: reading it takes longer than {0} s")]
    TooSlow(
        /// The time limit, in seconds.
        u64,
    ),
    /// Bytes of the image cannot be read.
    #[error("the image cannot be read there")]
    Io(#[from] io::Error),
}
