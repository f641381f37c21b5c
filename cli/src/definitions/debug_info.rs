//! Files with the debug information of a kernel or of a module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use hvprobe_sources::{Indexes, Sources};
use hvprobe_vmlinux::Kernel;

use super::cache;
use crate::output::values::source_lines::Lines;

/// Debug information for a machine: the kernel that it describes, and its source lines. Each may be missing.
#[derive(Debug, Default)]
pub(crate) struct Theirs {
    pub(crate) kernel: Option<TheirKernel>,
    pub(crate) lines: Option<Lines>,
}

/// Kernel that the debug information describes.
#[derive(Debug)]
pub(crate) struct TheirKernel {
    pub(crate) file: PathBuf,
    pub(crate) build_id: Vec<u8>,
}

/// Opens the kernel in the file at `path`.
pub(crate) fn open_kernel(path: &Path) -> anyhow::Result<Kernel> {
    Kernel::open(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the debug information in `file` if that is the file of a module.
pub(crate) fn open_module(file: &Path) -> anyhow::Result<Option<Sources>> {
    fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?;
    Sources::open_module(file).with_context(|| format!("cannot use {}", file.display()))
}

/// Returns the stored indexes of debug information, or `None` if there is no cache folder.
pub(crate) fn indexes() -> Option<Indexes> {
    Some(Indexes::new(cache::folder()?.join("debug-info")))
}

/// Opens the debug information in `file`, for `kernel`.
pub(crate) fn open(kernel: &Kernel, file: &Path) -> anyhow::Result<Sources> {
    Sources::open(kernel, file, indexes().as_ref())
        .with_context(|| format!("cannot use {}", file.display()))
}
