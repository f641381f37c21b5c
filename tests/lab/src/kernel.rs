//! The stock Debian kernel: fetched once, unpacked into the cache, used by rigs and guests alike.
//!
//! A folder under the cache's `kernel` is complete if its name has no leading dot; the file
//! `current` beside the folders names the one in use.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::packages;
use crate::place::{Cache, replace_if_different};
use crate::progress;

/// Debian's metapackage for the kernel that clouds boot.
const METAPACKAGE: &str = "linux-image-cloud-amd64";

/// An unpacked kernel package.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    folder: PathBuf,
    release: String,
}

impl Kernel {
    /// The kernel in use; fetched if there is none yet or if `update` asks for the current one.
    pub(crate) fn obtain(cache: &Cache, update: bool) -> Result<Self> {
        let current = cache.kernels().join("current");
        if !update && let Ok(name) = fs::read_to_string(&current) {
            let folder = cache.kernels().join(name);
            if let Ok(kernel) = Self::in_folder(&folder) {
                return Ok(kernel);
            }
        }
        let folder = fetch(cache)?;
        let kernel = Self::in_folder(&folder)?;
        let name = folder.file_name().context("kernel folder has no name")?;
        replace_if_different(&current, name.as_encoded_bytes())?;
        Ok(kernel)
    }

    fn in_folder(folder: &Path) -> Result<Self> {
        let boot = folder.join("boot");
        let release = fs::read_dir(&boot)
            .with_context(|| format!("no kernel in {}", boot.display()))?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .find_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned))
            .with_context(|| format!("no vmlinuz in {}", boot.display()))?;
        Ok(Self {
            folder: folder.to_path_buf(),
            release,
        })
    }

    /// The kernel's release, as `uname -r` prints it.
    pub(crate) fn release(&self) -> &str {
        &self.release
    }

    /// The `bzImage`.
    pub(crate) fn image(&self) -> PathBuf {
        self.folder
            .join("boot")
            .join(format!("vmlinuz-{}", self.release))
    }

    /// A module, by its path below the release's `kernel` folder.
    pub(crate) fn module(&self, path: &str) -> PathBuf {
        self.folder
            .join("lib/modules")
            .join(&self.release)
            .join("kernel")
            .join(path)
    }
}

/// Downloads and unpacks the current package unless it is there.
fn fetch(cache: &Cache) -> Result<PathBuf> {
    let package = progress::step(&format!("looking up {METAPACKAGE}"), || {
        packages::resolve(METAPACKAGE)
    })?;
    fs::create_dir_all(cache.kernels())?;
    // Readable by apt's own download user, hence not a private temporary folder.
    let work = tempfile::Builder::new()
        .prefix(".fetch-")
        .tempdir_in(cache.kernels())?;
    let file = progress::step(&format!("downloading {package} (26 MB)"), || {
        packages::download(&package, work.path())
    })?;
    let name = file.file_stem().context("package file has no name")?;
    let folder = cache.kernels().join(name);
    if !folder.exists() {
        let unpacked = work.path().join("unpacked");
        progress::step(&format!("unpacking {package}"), || {
            packages::unpack(&file, &unpacked)
        })?;
        fs::rename(&unpacked, &folder)?;
    }
    Ok(folder)
}
