//! Mutexes of the guest's kernel.

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;

/// Address of a mutex's owner word, which is nonzero while the mutex is held (include/linux/mutex_types.h).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutex(Gva);

impl Mutex {
    /// Returns the mutex called `name`, if the kernel's symbols and types suffice to find it.
    pub(crate) fn of(image: &KernelImage, name: &str) -> Option<Self> {
        // With PREEMPT_RT, only the second member exists.
        let questions = [("mutex", "owner"), ("mutex", "rtmutex.owner")];
        let members = image.members(&questions).ok()?;
        let owner = members.into_iter().flatten().next()?.offset;
        Some(Self(image.symbols().address_of(name)?.wrapping_add(owner)))
    }

    /// Returns whether the mutex is held; also true if its word cannot be read.
    pub(crate) fn is_held(self, tables: &PageTables, mem: &dyn PhysMemory) -> bool {
        tables.read_u64(mem, self.0) != Ok(0)
    }
}
