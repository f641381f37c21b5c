//! Where a hit happens, and what it can reach from there.
//!
//! Invariant: the result of a walk through the guest's page tables is not used in a later hit without reading the
//! tables again, nor after a stop of the vCPUs: see [`Walker`]. Handlers access the memory that the interrupted
//! code itself would access: addresses in the kernel's half through the kernel's own tables, addresses of the
//! process through the tables in CR3, which are walked anew each time. With page-table isolation the tables in CR3
//! are the kernel's copy, which maps the process's pages too. Memory that the process could not write is not
//! written: a copy-on-write page would have to be copied first, which only the guest can do.

use std::cell::Cell;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{PageTables, Walker};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_linux::image::TaskLayout;
use hvprobe_linux::task::Task;

use super::guest_memory::GuestMemory;
use super::table::ProbeTable;
use super::view::{KernelView, Surroundings};

/// The guest's kernel, as one vCPU reads it.
#[derive(Debug)]
pub(super) struct KernelReader {
    task: Option<TaskLayout>,
    walker: Walker,
}

impl KernelReader {
    /// Creates a reader that remembers no walk yet. Allocates.
    pub(super) fn new(view: KernelView) -> Self {
        Self {
            task: view.task.ok(),
            walker: Walker::new(view.tables),
        }
    }

    /// Fills `into` with the memory at `at`, before a hit. Returns whether it could be read.
    pub(super) fn read(&self, mem: &(impl PhysMemory + ?Sized), at: Gva, into: &mut [u8]) -> bool {
        self.walker.begin();
        self.walker.read(mem, at, into).is_ok()
    }
}

/// The context of a hit. Borrowed, so that no shared reference count is touched.
#[derive(Debug)]
pub(super) struct Scene<'a, M: ?Sized, C> {
    pub(super) table: &'a ProbeTable,
    layout: Option<&'a TaskLayout>,
    pub(super) walker: &'a Walker,
    pub(super) around: &'a Surroundings<'a, M, C>,
    /// Address of the current task, once it was looked up. It does not change during a hit.
    task: Cell<Option<Option<Gva>>>,
    /// Page tables of the process, once they were looked up.
    process: Cell<Option<Option<PageTables>>>,
}

impl<'a, M: PhysMemory + ?Sized, C> Scene<'a, M, C> {
    /// Creates the scene of one hit.
    pub(super) fn new(
        table: &'a ProbeTable,
        kernel: &'a KernelReader,
        around: &'a Surroundings<'a, M, C>,
    ) -> Self {
        kernel.walker.begin();
        Self {
            table,
            layout: kernel.task.as_ref(),
            walker: &kernel.walker,
            around,
            task: Cell::new(None),
            process: Cell::new(None),
        }
    }

    pub(super) fn memory(&self) -> GuestMemory<'_, M> {
        GuestMemory {
            walker: self.walker,
            mem: self.around.mem,
            wrote: false,
        }
    }

    /// Reads guest memory at `at` into `into`, for a handler. Addresses of the process are translated with the
    /// process's page tables. Returns whether all of `into` was read.
    pub(super) fn read(&self, at: Gva, into: &mut [u8]) -> bool {
        if !is_of_process(at) {
            return self.memory().read(at, into).is_ok();
        }
        let read = |tables: PageTables| tables.read(self.around.mem, at, into).is_ok();
        self.process().is_some_and(read)
    }

    /// Writes `bytes` to guest memory at `at`, for a handler. Returns whether they were written.
    pub(super) fn write(&self, at: Gva, bytes: &[u8]) -> bool {
        if !is_of_process(at) {
            return self.memory().write(at, bytes).is_ok();
        }
        let mem = self.around.mem;
        let write = |tables: PageTables| tables.write_as_process(mem, at, bytes).is_ok();
        self.process().is_some_and(write)
    }

    /// Returns the page tables that the process runs with; `None` if they are not known.
    fn process(&self) -> Option<PageTables> {
        if let Some(process) = self.process.get() {
            return process;
        }
        let cr3 = self.around.cr3.and_then(|read| read());
        let process = cr3.map(|cr3| PageTables {
            root: Gpa(cr3),
            ..*self.walker.tables()
        });
        self.process.set(Some(process));
        process
    }

    /// Calls `each` with the address and the value of every word of a stack of the kernel, from `from` to the
    /// stack's end.
    pub(super) fn words_above(&self, from: Gva, mut each: impl FnMut(Gva, Gva)) {
        /// Size of a stack, to which it is aligned, in kernels that check themselves with KASAN (`THREAD_SIZE` in
        /// arch/x86/include/asm/page_64_types.h). In other kernels it is half of this. What follows their stacks is
        /// not mapped, or contains nothing that is searched for.
        const STACK: u64 = 32 << 10;
        const PIECE: usize = 512;
        // The address comes from the guest, so it can be anything.
        let Some(mut at) = from.0.checked_next_multiple_of(8) else {
            return;
        };
        let Some(end) = (at | (STACK - 1)).checked_add(1) else {
            return;
        };
        while at < end {
            let mut bytes = [0; PIECE];
            // The first piece may be shorter, so that no piece crosses the end of a page.
            let behind = usize::try_from(at % PIECE as u64).unwrap_or(0);
            let piece = &mut bytes[behind..];
            if self.walker.read(self.around.mem, Gva(at), piece).is_err() {
                return;
            }
            for word in piece.as_chunks().0 {
                each(Gva(at), Gva(u64::from_le_bytes(*word)));
                at += 8;
            }
        }
    }

    pub(super) fn read_u64(&self, at: Gva) -> Option<u64> {
        self.walker.read_u64(self.around.mem, at).ok()
    }

    /// Returns the address of the current task.
    pub(super) fn task(&self) -> Option<Gva> {
        if let Some(task) = self.task.get() {
            return task;
        }
        let (mem, gs_base) = (self.around.mem, self.around.gs_base);
        let task = self
            .layout
            .and_then(|layout| layout.pointer(self.walker, mem, gs_base));
        self.task.set(Some(task));
        task
    }

    /// Reads the current task.
    pub(super) fn current(&self) -> Option<Task> {
        let task = self.task()?;
        self.layout?.read(self.walker, self.around.mem, task)
    }
}

/// Returns whether `at` is in the lower half of the address space, which each process has for itself.
pub(super) fn is_of_process(at: Gva) -> bool {
    at.0.leading_zeros() > 0
}
