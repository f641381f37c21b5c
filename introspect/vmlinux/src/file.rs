//! Opens files that a user has named, which may be anything.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens the file at `path`, which must be a regular file. Opening a FIFO would wait for a writer, and reading
/// a device may never end.
///
/// # Errors
/// When it is not a regular file or cannot be opened.
pub fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if !kind.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_files_are_opened_and_nothing_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        for path in [&fifo, Path::new("/dev/zero")] {
            let error = open(path).unwrap_err();
            assert_eq!(error.to_string(), "it is not a regular file");
        }
        let error = open(folder.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        let file = folder.path().join("file");
        assert_eq!(open(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&file, "").unwrap();
        open(&file).unwrap();
    }
}
