//! The text that names the running kernel.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;

/// The beginning of the constant text that names the kernel's version (init/version.c).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Banner([u8; 32]);

impl Banner {
    /// As it is in the guest's memory now, if it can be found.
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
