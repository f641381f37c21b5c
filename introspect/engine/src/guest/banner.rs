//! The text that identifies the running kernel.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;

/// Beginning of the constant text with the kernel's version (init/version.c).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Banner([u8; 32]);

impl Banner {
    /// Reads the text from the guest's memory; `None` if it cannot be found.
    pub(crate) fn read(
        image: &KernelImage,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Option<Self> {
        let at = image.symbols().address_of("linux_banner")?;
        let mut banner = Self([0; 32]);
        tables.read(mem, at, &mut banner.0).ok()?;
        Some(banner)
    }
}
