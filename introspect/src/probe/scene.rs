//! Where a hit happens, and what it can reach from there.
//!
//! Invariant: nothing that a walk to the guest's memory led to is used in a later hit without a look
//! at the guest's tables, nor after a stop of the virtual CPUs: see [`Walker`].

use std::cell::Cell;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::Walker;

use super::guest_memory::GuestMemory;
use super::hit::{KernelView, Surroundings};
use super::table::ProbeTable;
use crate::image::TaskLayout;
use crate::task::Task;

/// The guest's kernel, as one virtual CPU reads it.
#[derive(Debug)]
pub(super) struct Kernel {
    task: Option<TaskLayout>,
    walker: Walker,
}

impl Kernel {
    /// Allocates.
    pub(super) fn new(view: KernelView) -> Self {
        Self {
            task: view.task,
            walker: Walker::new(view.tables),
        }
    }

    /// Fills `into` with what is at `at` now, before a hit; whether it could be read.
    pub(super) fn read(&self, mem: &(impl PhysMemory + ?Sized), at: Gva, into: &mut [u8]) -> bool {
        self.walker.begin();
        self.walker.read(mem, at, into).is_ok()
    }
}

/// Where a hit happens: borrowed, so that no shared reference count is touched.
#[derive(Debug)]
pub(super) struct Scene<'a, M: ?Sized, C> {
    pub(super) table: &'a ProbeTable,
    layout: Option<&'a TaskLayout>,
    pub(super) walker: &'a Walker,
    pub(super) around: &'a Surroundings<'a, M, C>,
    /// Where the current task is, once it was asked for: it does not change in a hit.
    task: Cell<Option<Option<Gva>>>,
}

impl<'a, M: PhysMemory + ?Sized, C> Scene<'a, M, C> {
    /// The scene of another hit.
    pub(super) fn new(
        table: &'a ProbeTable,
        kernel: &'a Kernel,
        around: &'a Surroundings<'a, M, C>,
    ) -> Self {
        kernel.walker.begin();
        Self {
            table,
            layout: kernel.task.as_ref(),
            walker: &kernel.walker,
            around,
            task: Cell::new(None),
        }
    }

    pub(super) fn memory(&self) -> GuestMemory<'_, M> {
        GuestMemory {
            walker: self.walker,
            mem: self.around.mem,
            wrote: false,
        }
    }

    pub(super) fn read_u64(&self, at: Gva) -> Option<u64> {
        self.walker.read_u64(self.around.mem, at).ok()
    }

    /// Where the current task is.
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

    /// The current task.
    pub(super) fn current(&self) -> Option<Task> {
        let task = self.task()?;
        self.layout?.read(self.walker, self.around.mem, task)
    }
}
