//! Debian packages: which are missing, installing them, fetching one without installing it.
//!
//! Package lists are refreshed only after something failed without that, and every failure becomes
//! one line that carries apt's own reason. apt verifies what it downloads.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{fs, str};

use anyhow::{Context, Result, anyhow, bail};

use crate::progress;

/// Bounded patience, so that a machine without network hears about it soon.
const PATIENCE: [&str; 6] = [
    "-o",
    "Acquire::Retries=1",
    "-o",
    "Acquire::http::Timeout=20",
    "-o",
    "Acquire::https::Timeout=20",
];

/// Makes sure that `names` are installed.
pub(crate) fn ensure(names: &[&str]) -> Result<()> {
    let missing = missing(names)?;
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        bail!(
            "packages are missing and only root can install them: \
             apt-get install --no-install-recommends {list}"
        );
    }
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(&missing);
    progress::step(&format!("installing {list}"), || {
        with_fresh_lists(|| apt_get(&arguments, None))
            .with_context(|| format!("cannot install {list}"))
    })
}

/// The package that the metapackage `name` stands for now: its first dependency.
pub(crate) fn resolve(name: &str) -> Result<String> {
    with_fresh_lists(|| {
        let output = run(Command::new("apt-cache").args(["depends", "--important", name]))?;
        dependency(&output.stdout).with_context(|| format!("apt knows no package {name}"))
    })
    .with_context(|| format!("cannot tell what {name} stands for"))
}

/// Downloads `package` into the empty folder `folder` and returns the file.
pub(crate) fn download(package: &str, folder: &Path) -> Result<PathBuf> {
    with_fresh_lists(|| apt_get(&["download", package], Some(folder)))
        .with_context(|| format!("cannot download {package}"))?;
    fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("apt-get download left no file for {package}"))
}

/// Unpacks a package file into `folder`, running none of its scripts.
pub(crate) fn unpack(file: &Path, folder: &Path) -> Result<()> {
    run(Command::new("dpkg").arg("-x").arg(file).arg(folder))
        .map(drop)
        .with_context(|| format!("cannot unpack {}", file.display()))
}

fn missing<'a>(names: &[&'a str]) -> Result<Vec<&'a str>> {
    // dpkg-query fails when it knows nothing of a name, and still lists the others.
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${db:Status-Status} ${Package}\n"])
        .args(names)
        .env("LC_ALL", "C")
        .output()
        .map_err(|error| not_started("dpkg-query", error))?;
    let installed = str::from_utf8(&output.stdout)?;
    Ok(names
        .iter()
        .copied()
        .filter(|name| {
            !installed
                .lines()
                .any(|line| line == format!("installed {name}"))
        })
        .collect())
}

/// Runs `action`; if it fails, refreshes the package lists and runs it once more.
fn with_fresh_lists<T>(action: impl Fn() -> Result<T>) -> Result<T> {
    action().or_else(|_| {
        // Whether this worked shows in the second try: a list that cannot be fetched, or that
        // only root may fetch, need not be the one that matters.
        let _ = apt_get(&["update"], None);
        action()
    })
}

fn apt_get(arguments: &[&str], folder: Option<&Path>) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.arg("-q").args(PATIENCE).args(arguments);
    if let Some(folder) = folder {
        command.current_dir(folder);
    }
    run(&mut command).map(drop)
}

/// Runs a tool to its end; a failure carries the tool's own first complaint.
fn run(command: &mut Command) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .env("LC_ALL", "C")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|error| not_started(&program, error))?;
    if output.status.success() {
        return Ok(output);
    }
    if let Some(signal) = output.status.signal() {
        bail!("{program} was ended by signal {signal}");
    }
    bail!("{program}: {}", complaint(&output.stderr));
}

fn not_started(program: &str, error: std::io::Error) -> anyhow::Error {
    if error.kind() == ErrorKind::NotFound {
        anyhow!("{program} is not there: the lab takes its packages and kernel from Debian's apt")
    } else {
        anyhow!("{program} does not start: {error}")
    }
}

/// The first line in which apt names an error, or the last line there is.
fn complaint(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .clone()
        .find_map(|line| line.strip_prefix("E: "))
        .or_else(|| lines.next_back())
        .unwrap_or("failed without a word")
        .trim()
        .to_owned()
}

/// The first `Depends:` of what `apt-cache depends` prints.
fn dependency(listing: &[u8]) -> Option<String> {
    let listing = String::from_utf8_lossy(listing);
    let name = listing
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))?;
    Some(name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependency_is_read_from_the_listing() {
        let listing = b"linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n";
        assert_eq!(
            dependency(listing).as_deref(),
            Some("linux-image-6.1.0-56-cloud-amd64")
        );
    }

    #[test]
    fn listing_without_dependency_is_none() {
        assert_eq!(dependency(b"busybox-static\n"), None);
    }

    #[test]
    fn complaint_is_the_first_error_line() {
        let stderr = b"W: something\nE: Failed to fetch http://x  Could not connect\nE: more\n";
        assert_eq!(
            complaint(stderr),
            "Failed to fetch http://x  Could not connect"
        );
    }

    #[test]
    fn complaint_without_error_line_is_the_last_line() {
        assert_eq!(complaint(b"one\ntwo\n\n"), "two");
        assert_eq!(complaint(b""), "failed without a word");
    }

    #[test]
    fn tool_that_is_not_there_is_named() {
        let error = run(&mut Command::new("no-such-tool-of-apt")).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("no-such-tool-of-apt is not there")
        );
    }
}
