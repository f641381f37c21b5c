//! A kernel's file, which is unpacked and read once for all machines that are booted from it.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_vm::loader::LoadError;
use hvprobe_vmlinux::Kernel;

/// An unpacked kernel, and its symbols and types, which are read when they are first needed. Machines that are
/// booted from the same value share all of it.
#[derive(Debug)]
pub struct KernelFile {
    kernel: Kernel,
    image: Mutex<Option<Arc<KernelImage>>>,
}

impl KernelFile {
    /// Reads and unpacks the file at `path`.
    ///
    /// # Errors
    /// As [`Kernel::open`].
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        Ok(Self {
            kernel: Kernel::open(path)?,
            image: Mutex::default(),
        })
    }

    /// Returns the unpacked kernel.
    pub(crate) fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Returns the kernel's symbols and types, which are read at the first call.
    pub(crate) fn image(&self) -> Result<Arc<KernelImage>, ImageError> {
        let mut known = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = &*known {
            return Ok(Arc::clone(image));
        }
        let image = Arc::new(KernelImage::parse(self.kernel.elf())?);
        Ok(Arc::clone(known.insert(image)))
    }
}
