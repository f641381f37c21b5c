//! Input of a hit: how to read the guest's kernel, and the vCPU on which the hit happens.

use std::fmt;

use hvprobe_arch::Gva;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::TaskLayout;
use hvprobe_linux::task::TaskUnknown;

/// How to read the guest's kernel at a hit.
#[derive(Clone, Copy, Debug)]
pub struct KernelView {
    /// The kernel's own page tables, which do not depend on the running process.
    pub tables: PageTables,
    /// Where to find the current task. If that is not known, events leave the task out.
    pub task: Result<TaskLayout, TaskUnknown>,
    /// Offset of a CPU's number, an `i32`, from its per-CPU base; `None` if it is not known. It is added modulo
    /// 2^64.
    pub cpu_number: Option<u64>,
    /// The kernel's interrupt descriptor table.
    pub idt: Gva,
}

/// Input of a hit from the vCPU on which it happens.
pub struct Surroundings<'a, M: ?Sized, C> {
    /// Guest memory.
    pub mem: &'a M,
    /// The clocks.
    pub clock: &'a C,
    /// GS base: the per-CPU base while the kernel runs.
    pub gs_base: u64,
    /// Function that returns CR3. It is called at most once in a hit, when a handler accesses memory of the
    /// process. Must be given if [`HitHandler::reaches_process`](crate::HitHandler::reaches_process) returns true.
    pub cr3: Option<&'a dyn Fn() -> Option<u64>>,
}

impl<M: ?Sized, C> fmt::Debug for Surroundings<'_, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Surroundings")
            .field("gs_base", &self.gs_base)
            .finish_non_exhaustive()
    }
}
