//! Mutexes of the guest's kernel.

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;

/// A mutex, by the word of it that is not zero while somebody holds it (include/linux/mutex_types.h).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutex(Gva);

impl Mutex {
    /// That called `name`, if the kernel's symbols and types tell where it is.
    pub(crate) fn of(image: &KernelImage, name: &str) -> Option<Self> {
        // The second one with PREEMPT_RT.
        let questions = [("mutex", "owner"), ("mutex", "rtmutex.owner")];
        let members = image.members(&questions).ok()?;
        let owner = members.into_iter().flatten().next()?.offset;
        Some(Self(image.symbols().address_of(name)?.wrapping_add(owner)))
    }

    /// Whether somebody holds it, or that cannot be told.
    pub(crate) fn is_held(self, tables: &PageTables, mem: &dyn PhysMemory) -> bool {
        tables.read_u64(mem, self.0) != Ok(0)
    }
}
