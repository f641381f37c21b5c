//! The kernel's own tests and documentation of its trace events, from Debian's package with the source of the
//! guests' kernel.
//!
//! The cache's folder `source` has a folder `PACKAGE-for-RELEASE` for each kernel. If such a folder exists, it is
//! complete: it has the files of the source that [`KEPT`] names, and no others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::kernel::{Choice, Kernel};
use crate::packages::{self, Archives};
use crate::place::{Cache, files_below};
use crate::process;
use crate::progress;
use crate::tool;

/// Paths in the source that are kept.
const KEPT: [&str; 2] = [
    "tools/testing/selftests/ftrace/test.d",
    "Documentation/trace/*.rst",
];

/// Returns the folder with the files for the guests' kernel, which is that of `choice`, or `stock` without a
/// choice.
pub(super) fn obtain(cache: &Cache, stock: &Kernel, choice: Option<&Choice>) -> Result<PathBuf> {
    let (archives, release) = match choice {
        None => (Archives::of_machine(), stock.release().to_owned()),
        Some(Choice::Named(named)) if stock.is(named) => {
            (Archives::of_machine(), stock.release().to_owned())
        }
        Some(Choice::Named(named)) => {
            let kernel = Kernel::named(cache, named)?;
            (named.archives(cache)?, kernel.release().to_owned())
        }
        Some(Choice::Built(_) | Choice::File(_)) => {
            bail!(
                "--kernel: only Debian's own kernels have a package with their source, name one of them"
            )
        }
    };
    let package = package(&release)?;
    let _lock = cache.lock()?;
    let folder = cache.sources().join(format!("{package}-for-{release}"));
    if !folder.exists() {
        fetch(cache, &archives, &package, &folder)?;
    }
    Ok(folder)
}

/// Returns the name of the package with a kernel's source: `linux-source-6.1` for 6.1.0-13-cloud-amd64.
fn package(release: &str) -> Result<String> {
    let mut numbers = release.split('.');
    let (major, minor) = (numbers.next(), numbers.next());
    let (major, minor) = major
        .zip(minor)
        .with_context(|| format!("{release} is no release"))?;
    Ok(format!("linux-source-{major}.{minor}"))
}

/// Downloads `package`, and unpacks into `folder` only those of its files that [`KEPT`] names.
fn fetch(cache: &Cache, archives: &Archives, package: &str, folder: &Path) -> Result<()> {
    packages::ensure(&["xz-utils"])?;
    fs::create_dir_all(cache.sources())?;
    // apt downloads as a user of its own, which must be able to use the folder. So the folder is not a private
    // temporary one.
    let work = tempfile::Builder::new()
        .prefix(".fetch-")
        .tempdir_in(cache.sources())?;
    let files = progress::step(&format!("downloading {package} from {archives}"), || {
        archives.download(&[package.to_owned()], work.path())
    })?;
    let file = files.first().context("no package file")?;
    let kept = work.path().join("kept");
    fs::create_dir(&kept)?;
    progress::step(&format!("unpacking some of {package}"), || {
        let unpacked = work.path().join("unpacked");
        packages::unpack(file, &unpacked)?;
        let archive = unpacked.join(format!("usr/src/{package}.tar.xz"));
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(archive).arg("-C").arg(&kept);
        tar.args(["--strip-components=1", "--wildcards"]);
        tar.args(KEPT.map(|name| format!("{package}/{name}")));
        process::end_with_us(&mut tar);
        tool::run(&mut tar).with_context(|| format!("cannot unpack {package}"))
    })?;
    fs::rename(&kept, folder).context("cannot keep the kernel's tests")
}

/// Returns the names (without folders) and the contents of the files below `folder` whose names end in `ending`,
/// sorted.
pub(super) fn files(folder: &Path, ending: &str) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for path in files_below(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(ending) {
            let bytes = fs::read(&path);
            let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
            let text = String::from_utf8_lossy(&bytes).into_owned();
            found.push((name.into_owned(), text));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_is_named_by_the_release() {
        for (release, expected) in [
            ("6.1.0-48-cloud-amd64", "linux-source-6.1"),
            ("6.12.107+deb13-cloud-amd64", "linux-source-6.12"),
            ("7.2.13+deb14-amd64", "linux-source-7.2"),
        ] {
            assert_eq!(package(release).unwrap(), expected);
        }
        assert!(package("7").is_err());
    }

    #[test]
    fn files_are_found_in_all_folders_below() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("two.tc"), "2").unwrap();
        fs::write(folder.path().join("one.tc"), "1").unwrap();
        fs::write(folder.path().join("three.rst"), "3").unwrap();
        let found = files(folder.path(), ".tc").unwrap();
        assert_eq!(
            found,
            [("one.tc", "1"), ("two.tc", "2")].map(|(a, b)| (a.to_owned(), b.to_owned()))
        );
    }
}
