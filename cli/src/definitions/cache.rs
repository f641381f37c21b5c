//! The cache folder, with the guest that `cargo lab setup` fetched.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::kernels;

/// Returns the kernel whose name was `given`, or the one of the guest that `cargo lab setup` fetched.
pub(crate) fn kernel(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    match given {
        Some(name) => kernels::named(name),
        None => cached("kernel").context(
            "there is no guest kernel yet: run `cargo lab setup` to fetch one, or give --kernel",
        ),
    }
}

/// Returns the file `name` of the guest that `cargo lab setup` fetched, if it exists.
pub(super) fn cached(name: &str) -> Option<PathBuf> {
    Some(folder()?.join("guest").join(name)).filter(|file| file.exists())
}

/// Returns the cache folder: `$HVPROBE_CACHE`, else `$XDG_CACHE_HOME/hvprobe`, else `~/.cache/hvprobe`.
pub(crate) fn folder() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
    variable("HVPROBE_CACHE").map(PathBuf::from).or_else(|| {
        variable("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(Path::new(&variable("HOME")?).join(".cache")))
            .map(|caches| caches.join("hvprobe"))
    })
}
