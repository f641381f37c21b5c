//! Access to files of tracefs, and functions that mount tracefs and similar file systems.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

const TRACEFS: &str = "/sys/kernel/tracing";

/// Mounts tracefs unless it is mounted.
///
/// # Errors
/// When it cannot be mounted here.
pub fn mount() -> Result<()> {
    mount_kind("tracefs", TRACEFS, "trace")
}

/// Mounts the file system `kind` at `folder`, unless `folder` contains the file `known`, which shows that it is
/// mounted.
///
/// # Errors
/// When it cannot be mounted here.
pub fn mount_kind(kind: &str, folder: &str, known: &str) -> Result<()> {
    if Path::new(folder).join(known).exists() {
        return Ok(());
    }
    let mounted = Command::new("mount")
        .args(["-t", kind, kind, folder])
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        bail!("cannot mount {kind}");
    }
    Ok(())
}

/// Writes `value` to `file`.
///
/// # Errors
/// When the kernel has no such file or refuses the value.
pub fn set(file: &str, value: &str) -> Result<()> {
    let path = Path::new(TRACEFS).join(file);
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(&path)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Reads all of `file`.
///
/// # Errors
/// When the kernel has no such file.
pub fn get(file: &str) -> Result<String> {
    let path = Path::new(TRACEFS).join(file);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}
