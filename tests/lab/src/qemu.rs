//! QEMU for emulated machines: this machine's own if it emulates nested paging well, else a newer one, which is
//! unpacked into the cache.
//!
//! ```text
//!   own QEMU is 10.0 or newer ──────────────────────────► own, KVM with nested paging
//!   Debian 12 ──► bookworm-backports, 10.0 ─────────────► unpacked, KVM with nested paging
//!                     └── cannot be fetched ──┐
//!   else ─────────────────────────────────────┴─────────► own, KVM without nested paging
//! ```
//! Guests boot in three quarters of the time with nested paging, and KVM without it hangs on QEMU 10.0.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::packages::Archives;
use crate::place::{Cache, replace_if_different};
use crate::{progress, tool};

/// The first major version whose nested paging does not lose guests. Of those before it, 7.2 does
/// (docs/hosts.md); the others were not tried.
const SOUND: u32 = 10;
/// The suite with such a version for Debian 12, and the packages there that an emulated machine needs, besides
/// the libraries that Debian 12's own packages depend on.
const SUITE: &str = "bookworm-backports";
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-data", "seabios"];
/// The program, and the folders of firmware in those packages.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];

/// A QEMU that emulates x86-64.
#[derive(Clone, Debug)]
pub(crate) struct Qemu {
    /// The folder with the unpacked packages; `None` for this machine's own QEMU.
    unpacked: Option<PathBuf>,
    major: u32,
}

impl Qemu {
    /// Returns the best QEMU for this machine. Its own must be installed. Fetches another one at most once, and
    /// falls back to the machine's own if that fails.
    pub(crate) fn obtain(cache: &Cache) -> Result<Self> {
        let own = Self::own()?;
        if own.has_nested_paging() || !is_debian_12() {
            return Ok(own);
        }
        let current = cache.qemu().join("current");
        if let Some(unpacked) = present(&current) {
            return Self::in_folder(unpacked);
        }
        match fetch(cache, &current) {
            Ok(unpacked) => Self::in_folder(unpacked),
            Err(error) => {
                let version = own.major;
                progress::note(&format!(
                    "emulated machines take half as long again with QEMU {version}: {error:#}"
                ));
                Ok(own)
            }
        }
    }

    fn own() -> Result<Self> {
        Self::of(None)
    }

    fn in_folder(unpacked: PathBuf) -> Result<Self> {
        Self::of(Some(unpacked))
    }

    fn of(unpacked: Option<PathBuf>) -> Result<Self> {
        let mut qemu = Self { unpacked, major: 0 };
        let output = tool::run(qemu.command().arg("--version"))?;
        qemu.major = major(&String::from_utf8_lossy(&output.stdout))?;
        Ok(qemu)
    }

    /// Returns the command that starts it, to which the caller adds the machine.
    pub(crate) fn command(&self) -> Command {
        let Some(unpacked) = &self.unpacked else {
            return Command::new("qemu-system-x86_64");
        };
        let mut command = Command::new(unpacked.join(PROGRAM));
        for folder in FIRMWARE {
            command.arg("-L").arg(unpacked.join(folder));
        }
        command
    }

    /// Returns whether KVM in a machine that it emulates is to use nested paging.
    pub(crate) fn has_nested_paging(&self) -> bool {
        self.major >= SOUND
    }
}

/// Returns the folder that the file `current` names, if the program is there.
fn present(current: &Path) -> Option<PathBuf> {
    let folder = current.parent()?.join(fs::read_to_string(current).ok()?);
    folder.join(PROGRAM).is_file().then_some(folder)
}

fn fetch(cache: &Cache, current: &Path) -> Result<PathBuf> {
    let archives = Archives::of_suite(SUITE, &cache.suite(SUITE))?;
    let folder = archives.unpacked(&PACKAGES.map(str::to_owned), &cache.qemu())?;
    // The libraries of Debian 12 may be too old for a later version.
    Qemu::in_folder(folder.clone())?;
    let name = folder.file_name().context("the folder has no name")?;
    replace_if_different(current, name.as_encoded_bytes())?;
    Ok(folder)
}

fn is_debian_12() -> bool {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    release
        .lines()
        .any(|line| line == "VERSION_CODENAME=bookworm")
}

/// Returns the major version in the output of `--version`.
fn major(output: &str) -> Result<u32> {
    let version = output.strip_prefix("QEMU emulator version ");
    let major = version.and_then(|version| version.split('.').next()?.parse().ok());
    match major {
        Some(major) => Ok(major),
        None => bail!(
            "QEMU does not print its version but {:?}",
            output.lines().next().unwrap_or_default()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn major_version_is_read_from_what_qemu_prints() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c)\n";
        assert_eq!(major(debian).unwrap(), 7);
        assert_eq!(major("QEMU emulator version 10.0.2\n").unwrap(), 10);
        for other in ["", "\n", "QEMU emulator version next\n", "bash: no\n"] {
            let error = major(other).unwrap_err().to_string();
            assert!(error.starts_with("QEMU does not print"), "{error}");
        }
    }

    #[test]
    fn unpacked_qemu_is_started_with_its_own_firmware() {
        let qemu = |unpacked: Option<&str>, major| Qemu {
            unpacked: unpacked.map(PathBuf::from),
            major,
        };
        let own = qemu(None, 7);
        assert!(!own.has_nested_paging());
        assert_eq!(own.command().get_program(), "qemu-system-x86_64");
        let other = qemu(Some("/cache/q"), 10);
        assert!(other.has_nested_paging());
        let command = other.command();
        assert_eq!(command.get_program(), "/cache/q/usr/bin/qemu-system-x86_64");
        let firmware = [
            "-L",
            "/cache/q/usr/share/qemu",
            "-L",
            "/cache/q/usr/share/seabios",
        ];
        assert!(command.get_args().eq(firmware));
    }

    #[test]
    fn folder_is_present_only_with_its_program() {
        let folder = tempfile::tempdir().unwrap();
        let current = folder.path().join("current");
        assert_eq!(present(&current), None);
        replace_if_different(&current, b"ten").unwrap();
        assert_eq!(present(&current), None);
        replace_if_different(&folder.path().join("ten").join(PROGRAM), b"").unwrap();
        assert_eq!(present(&current), Some(folder.path().join("ten")));
    }
}
