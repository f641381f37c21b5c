//! Files of `/proc` and `/sys`, with errors that name them.

use std::fs;
use std::io;

/// Writes `value` to `path`.
pub(crate) fn write(path: &str, value: &str) -> io::Result<()> {
    fs::write(path, value).map_err(|error| named(path, &error))
}

/// Reads all of `path`.
pub(crate) fn read(path: &str) -> io::Result<String> {
    fs::read_to_string(path).map_err(|error| named(path, &error))
}

/// Returns `error` with `path` in its message.
pub(crate) fn named(path: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{path}: {error}"))
}
