//! Folders of the lab: the cache, which all checkouts of a user share, and the guests in it.
//!
//! A process that changes the cache holds its lock. A reader never sees an incomplete file, because files are
//! renamed into place.

use std::env;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Environment variable that overrides the cache folder, for the lab and for `hvprobe run`.
pub(crate) const CACHE_VARIABLE: &str = "HVPROBE_CACHE";

/// The cache folder.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Returns the cache folder: `$HVPROBE_CACHE`, else `$XDG_CACHE_HOME/hvprobe`, else `~/.cache/hvprobe`.
    pub(crate) fn locate() -> Result<Self> {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty());
        let root = if let Some(path) = set(CACHE_VARIABLE) {
            PathBuf::from(path)
        } else if let Some(path) = set("XDG_CACHE_HOME") {
            Path::new(&path).join("hvprobe")
        } else if let Some(path) = set("HOME") {
            Path::new(&path).join(".cache/hvprobe")
        } else {
            bail!("no cache folder: set HVPROBE_CACHE, XDG_CACHE_HOME or HOME");
        };
        Ok(Self {
            root: std::path::absolute(root)?,
        })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the folder for unpacked kernel packages, which has a folder for each kernel.
    pub(crate) fn kernels(&self) -> PathBuf {
        self.root.join("kernel")
    }

    /// Returns the folder for unpacked packages of QEMU, which has a folder for each version.
    pub(crate) fn qemu(&self) -> PathBuf {
        self.root.join("qemu")
    }

    /// Returns the folder for files from the sources of kernels, which has a folder for each kernel.
    pub(crate) fn sources(&self) -> PathBuf {
        self.root.join("source")
    }

    /// Returns the folder for gRPC clients of other languages.
    pub(crate) fn clients(&self) -> PathBuf {
        self.root.join("clients")
    }

    /// Returns the folder for apt's lists and settings for a Debian suite.
    pub(crate) fn suite(&self, name: &str) -> PathBuf {
        self.root.join("apt").join(name)
    }

    /// Returns the guest with the stock kernel. Emulated rigs boot the same kernel.
    pub(crate) fn guest(&self) -> Guest {
        Guest {
            root: self.root.clone(),
        }
    }

    /// Returns the guest with another kernel. `name` is the name of the folder for guests with this kernel.
    pub(crate) fn other_guest(&self, name: &str) -> Guest {
        Guest {
            root: self.root.join("other").join(name),
        }
    }

    /// Creates the cache and takes its lock. Waits if another lab holds the lock. Dropping the returned file
    /// releases it.
    pub(crate) fn lock(&self) -> Result<File> {
        let describe = || format!("cannot use the cache folder {}", self.root.display());
        fs::create_dir_all(&self.root).with_context(describe)?;
        let lock = File::create(self.root.join("lock")).with_context(describe)?;
        lock.lock().with_context(describe)?;
        Ok(lock)
    }
}

/// A kernel for guests, and the initramfs that goes with it.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    root: PathBuf,
}

impl Guest {
    /// Returns the folder that programs get as their cache, so that they boot this guest.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the folder with the kernel and the initramfs.
    pub(crate) fn folder(&self) -> PathBuf {
        self.root.join("guest")
    }

    pub(crate) fn kernel(&self) -> PathBuf {
        self.folder().join("kernel")
    }

    pub(crate) fn initrd(&self) -> PathBuf {
        self.folder().join("initrd.cpio")
    }
}

/// Returns the files in `folder`, and in all folders below it.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut folders, mut found) = (vec![folder.to_owned()], Vec::new());
    while let Some(below) = folders.pop() {
        let describe = || format!("cannot look into {}", below.display());
        for entry in fs::read_dir(&below).with_context(describe)? {
            let entry = entry.with_context(describe)?;
            match entry.file_type().with_context(describe)?.is_dir() {
                true => folders.push(entry.path()),
                false => found.push(entry.path()),
            }
        }
    }
    Ok(found)
}

/// Writes `contents` to `path`, unless the file has these contents already. Returns whether it wrote them.
pub(crate) fn replace_if_different(path: &Path, contents: &[u8]) -> Result<bool> {
    match fs::read(path) {
        Ok(present) if present == contents => return Ok(false),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", path.display()));
        }
    }
    let describe = || format!("cannot write {}", path.display());
    let folder = path.parent().with_context(describe)?;
    fs::create_dir_all(folder).with_context(describe)?;
    let mut file = tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o644))
        .tempfile_in(folder)
        .with_context(describe)?;
    std::io::Write::write_all(&mut file, contents).with_context(describe)?;
    file.persist(path).with_context(describe)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_written_once_and_again_when_it_differs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        assert!(replace_if_different(&path, b"one").unwrap());
        assert!(!replace_if_different(&path, b"one").unwrap());
        assert!(replace_if_different(&path, b"two").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"two");
    }
}
