//! Choice of the QEMU for emulated machines: this machine's own if it emulates nested paging well, else a newer
//! one, which is unpacked into the cache.
//!
//! ```text
//!   own QEMU is 10.0 or newer ──────────────────────────► own, KVM with nested paging
//!   Debian 12 ──► bookworm-backports, 10.0 ─────────────► unpacked, KVM with nested paging
//!                     └── cannot be fetched ──┐  (tried again after a day)
//!   else ─────────────────────────────────────┴─────────► own, KVM without nested paging
//! ```
//! Guests boot in three quarters of the time with nested paging, and KVM without it hangs on QEMU 10.0.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::packages::Archives;
use crate::place::{Cache, replace_if_different};
use crate::{progress, tool};

/// The first major version whose nested paging is known not to lose guests. Of the versions before it, 7.2 does
/// lose guests (docs/hosts.md); the others were not tried.
const SOUND: u32 = 10;
/// The suite that has QEMU in version [`SOUND`] or later for Debian 12.
const SUITE: &str = "bookworm-backports";
/// The packages of that suite that an emulated machine needs, besides the libraries that Debian 12's own packages
/// depend on.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-data", "seabios"];
/// The program in those packages.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
/// The folders with firmware in those packages.
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];

/// Time after a failed fetch until the fetch is tried again.
const RETRY: Duration = Duration::from_secs(24 * 3600);

/// A QEMU that emulates x86-64.
#[derive(Clone, Debug)]
pub(crate) struct Qemu {
    /// The folder with the unpacked packages; `None` for this machine's own QEMU.
    unpacked: Option<PathBuf>,
    major: u32,
}

impl Qemu {
    /// Returns the best QEMU for this machine. The machine's own must be installed. If another one is needed,
    /// fetches it if it is not in the cache, or if `update`. Returns the machine's own if the fetch fails, or has
    /// failed recently.
    pub(crate) fn obtain(cache: &Cache, update: bool) -> Result<Self> {
        let own = Self::of(None)?;
        if own.has_nested_paging() || !is_debian_12(&release()) {
            return Ok(own);
        }
        let folder = cache.qemu();
        let (current, failed) = (folder.join("current"), folder.join("unavailable"));
        if !update {
            if let Some(unpacked) = present(&current) {
                return Ok(unpacked);
            }
            if is_recent(&failed) {
                return Ok(own);
            }
        }
        let fetched = fetch(cache, &current);
        fetched.or_else(|error| {
            let version = own.major;
            progress::note(&format!(
                "emulated machines take a third longer, with QEMU {version}: {error:#}"
            ));
            fs::create_dir_all(&folder)?;
            fs::write(&failed, format!("{error:#}\n"))?;
            Ok(own)
        })
    }

    fn of(unpacked: Option<PathBuf>) -> Result<Self> {
        let mut qemu = Self { unpacked, major: 0 };
        let output = tool::run(qemu.command().arg("--version"))?;
        qemu.major = major(&String::from_utf8_lossy(&output.stdout));
        Ok(qemu)
    }

    /// Returns the command that starts this QEMU. The caller adds the options of the machine.
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

    /// Returns whether KVM in a machine that this QEMU emulates is to use nested paging.
    pub(crate) fn has_nested_paging(&self) -> bool {
        self.major >= SOUND
    }
}

/// Returns the QEMU in the folder that the file `current` names, if it starts.
fn present(current: &Path) -> Option<Qemu> {
    let folder = current.parent()?.join(fs::read_to_string(current).ok()?);
    Qemu::of(Some(folder)).ok()
}

/// Returns whether `file` was written less than [`RETRY`] ago.
fn is_recent(file: &Path) -> bool {
    let written = fs::metadata(file).and_then(|it| it.modified());
    let age = written.ok().and_then(|written| written.elapsed().ok());
    age.is_some_and(|age| age < RETRY)
}

fn fetch(cache: &Cache, current: &Path) -> Result<Qemu> {
    let archives = Archives::of_suite(SUITE, &cache.suite(SUITE))?;
    let folder = archives.unpacked(&PACKAGES.map(str::to_owned), &cache.qemu())?;
    // Check that the program starts: Debian 12's libraries may be too old for a later version of QEMU.
    let qemu = match Qemu::of(Some(folder.clone())) {
        Ok(qemu) => qemu,
        Err(error) => {
            let _ = fs::remove_dir_all(&folder);
            return Err(error);
        }
    };
    let name = folder.file_name().context("the folder has no name")?;
    replace_if_different(current, name.as_encoded_bytes())?;
    Ok(qemu)
}

/// Returns the contents of this machine's os-release(5).
fn release() -> String {
    fs::read_to_string("/etc/os-release").unwrap_or_default()
}

/// Returns whether `release` is that of Debian 12 or a system that is built from it.
fn is_debian_12(release: &str) -> bool {
    release.lines().any(|line| {
        let name = line
            .strip_prefix("VERSION_CODENAME=")
            .or_else(|| line.strip_prefix("DEBIAN_CODENAME="));
        name.is_some_and(|name| name.trim_matches(['"', '\'']) == "bookworm")
    })
}

/// Returns the major version in the output of `--version`; 0 if there is none.
fn major(output: &str) -> u32 {
    let mut lines = output.lines();
    let version = lines.find_map(|line| line.strip_prefix("QEMU emulator version "));
    let major = version.and_then(|version| version.split('.').next()?.parse().ok());
    major.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::PermissionsExt as _;
    use std::time::SystemTime;

    #[test]
    fn major_version_is_read_from_what_qemu_prints() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c)\n";
        assert_eq!(major(debian), 7);
        assert_eq!(major("a wrapper\nQEMU emulator version 10.0.2\n"), 10);
        for other in ["", "\n", "QEMU emulator version next\n", "bash: no\n"] {
            assert_eq!(major(other), 0, "{other:?}");
        }
    }

    #[test]
    fn debian_12_is_known_by_its_codename() {
        for yes in [
            "ID=debian\nVERSION_CODENAME=bookworm\n",
            "VERSION_CODENAME='bookworm'\n",
            "VERSION_CODENAME=faye\nDEBIAN_CODENAME=\"bookworm\"\n",
        ] {
            assert!(is_debian_12(yes), "{yes}");
        }
        for no in ["", "VERSION_CODENAME=trixie\n", "NAME=bookworm\n"] {
            assert!(!is_debian_12(no), "{no}");
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
    fn folder_is_present_only_with_a_program_that_starts() {
        let folder = tempfile::tempdir().unwrap();
        let current = folder.path().join("current");
        assert!(present(&current).is_none());
        replace_if_different(&current, b"ten").unwrap();
        assert!(present(&current).is_none());
        let program = folder.path().join("ten").join(PROGRAM);
        replace_if_different(&program, b"#!/bin/sh\necho QEMU emulator version 10.0.2\n").unwrap();
        assert!(present(&current).is_none());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let qemu = present(&current).unwrap();
        assert_eq!(qemu.unpacked, Some(folder.path().join("ten")));
        assert!(qemu.has_nested_paging());
    }

    #[test]
    fn failed_fetch_is_not_repeated_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let failed = folder.path().join("unavailable");
        assert!(!is_recent(&failed));
        fs::write(&failed, "no network\n").unwrap();
        assert!(is_recent(&failed));
        let file = fs::File::options().write(true).open(&failed).unwrap();
        file.set_modified(SystemTime::now() - RETRY).unwrap();
        assert!(!is_recent(&failed));
    }
}
