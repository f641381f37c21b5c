//! Limits of requests. All of them are checked before any part of a request is processed.

use std::path::{Path, PathBuf};

use hvprobe_proto::Failure;
pub(crate) use hvprobe_proto::limits::{BATCH, BUILD_ID, DEFINITION, TYPES, at_most};
use hvprobe_proto::v1::ErrorKind;
use tonic::Status;

/// Maximum length of a message, in bytes.
pub(crate) const MESSAGE: usize = 8 << 20;
/// Maximum length of a reflection request, in bytes. The limit is low because the server repeats an unknown name in
/// the headers of its answer.
pub(crate) const REFLECTED: usize = 1024;
/// Maximum number of states in a request for machines: far more than exist.
pub(crate) const STATES: usize = 64;
/// Maximum number of bytes of guest memory that are read at once.
pub(crate) const READ: usize = 1 << 20;
/// Maximum length of an uploaded file with debug information, in bytes: four times the length of the file of a
/// distribution's kernel.
pub(crate) const UPLOAD: u64 = 2 << 30;
/// Maximum total length of all uploads, in bytes.
pub(crate) const UPLOADS: u64 = 8 << 30;
/// Maximum number of incomplete uploads at a time.
pub(crate) const UPLOADS_UNDER_WAY: usize = 32;
/// Maximum number of parts of uploads that are written at a time.
pub(crate) const UPLOADS_AT_ONCE: usize = 8;
/// Maximum number of bytes that are typed on a console at once.
pub(crate) const CONSOLE_WRITE: usize = 64 << 10;
/// Maximum length of a task's name, in bytes (`TASK_COMM_LEN`).
pub(crate) const COMM: usize = 16;
/// Maximum number of characters of a wrong text that an error shows.
pub(crate) const SHOWN: usize = 64;
/// Maximum length of a path, in bytes, without its closing zero (`PATH_MAX`).
const PATH: usize = 4095;
/// Maximum length, in bytes, of the name of a machine or of a session's owner, and of the name or value of a label.
pub(crate) const NAME: usize = 63;

/// Checks that `name` can be the name of a machine.
pub(crate) fn machine_name(name: &str) -> Result<(), Failure> {
    plain_name("machine name", ErrorKind::BadName, name)
}

/// Checks that `name` can be the name of a session's owner.
pub(crate) fn owner_name(name: &str) -> Result<(), Failure> {
    plain_name("name of an owner", ErrorKind::BadOwner, name)
}

fn plain_name(what: &str, kind: ErrorKind, name: &str) -> Result<(), Failure> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.len() <= NAME
        && name.bytes().all(allowed)
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
    {
        return Ok(());
    }
    let message = format!(
        "bad {what}: use 1 to {NAME} letters, digits, `-`, `_` and `.`, a letter or \
         digit first"
    );
    Err(Failure::invalid(kind, message))
}

/// Checks the length of `path`, and that it is absolute: the server's working directory is not that of its clients.
pub(crate) fn path(what: &str, field: &str, path: String) -> Result<PathBuf, Status> {
    at_most(what, path.len(), PATH)?;
    if Path::new(&path).is_absolute() && !path.contains('\0') {
        return Ok(path.into());
    }
    let message = format!("{what} has to be an absolute path");
    let failure = Failure::invalid(ErrorKind::BadMachine, message);
    Err(failure.on(field).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for good in ["a", "vm0", "7", "web-1.test_x", &"x".repeat(63)] {
            assert!(machine_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", ".", "a b", "a/b", "ä", "a\n", &"x".repeat(64)] {
            assert!(machine_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn paths_are_absolute() {
        assert!(path("kernel", "kernel", "/boot/vmlinuz".into()).is_ok());
        for bad in ["", "vmlinuz", "/a\0b", &format!("/{}", "x".repeat(5000))] {
            assert!(path("kernel", "kernel", bad.into()).is_err(), "{bad:?}");
        }
    }
}
