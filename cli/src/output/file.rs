//! File that events are written to, instead of standard output.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// File that events are written to.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
    file: File,
}

impl OutputFile {
    /// Creates the file, or empties it.
    pub(crate) fn create(path: &Path) -> Result<Self, Unwritten> {
        let file = File::create(path).map_err(|error| Unwritten::new(path, error))?;
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }

    /// Appends `text` without buffering.
    pub(crate) fn write(&mut self, text: &str) -> Result<(), Unwritten> {
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|error| Unwritten::new(&self.path, error))
    }
}

/// Error of a write to the requested file. A pipe whose reader has gone away is also an error, unlike on standard
/// output, where the reader counts as having read enough.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {why}", path.display())]
pub(crate) struct Unwritten {
    path: PathBuf,
    why: io::Error,
}

impl Unwritten {
    /// Makes an error from `path` and the cause.
    pub(crate) fn new(path: &Path, why: io::Error) -> Self {
        Self {
            path: path.to_owned(),
            why,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::status::closed_output;

    #[test]
    fn full_disk_and_a_reader_that_has_gone_are_reported() {
        let full = Path::new("/dev/full");
        let mut file = OutputFile::create(full).unwrap();
        let error = file.write("x").unwrap_err().to_string();
        assert_eq!(
            error,
            "cannot write /dev/full: No space left on device (os error 28)"
        );

        let (reader, writer) = io::pipe().unwrap();
        let mut pipe = OutputFile {
            path: "events".into(),
            file: File::from(std::os::fd::OwnedFd::from(writer)),
        };
        drop(reader);
        let error = anyhow::Error::from(pipe.write("x").unwrap_err());
        assert!(!closed_output(&error), "{error}");
        assert!(error.to_string().starts_with("cannot write events: "));

        let nowhere = OutputFile::create(Path::new("/nowhere/events")).unwrap_err();
        assert!(nowhere.to_string().contains("No such file"), "{nowhere}");
    }
}
