//! The task a hit belongs to, read from the guest's `task_struct`.
//!
//! Invariant: every read is bounds-checked and a failed one yields "no task", never an error: a
//! hit is an event even when the guest's own structures are nonsense.

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;

use crate::image::TaskLayout;

/// Length of `task_struct.comm` (`TASK_COMM_LEN` in include/linux/sched.h).
pub const COMM_LEN: usize = 16;

/// A task of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Thread id: what the kernel calls `pid`.
    pub pid: i32,
    /// Process id: what the kernel calls `tgid`.
    pub tgid: i32,
    /// Command name, padded with NULs.
    pub comm: [u8; COMM_LEN],
}

impl Task {
    /// The command name up to its first NUL, with what is not UTF-8 replaced.
    #[must_use]
    pub fn comm(&self) -> String {
        let end = self.comm.iter().position(|&b| b == 0).unwrap_or(COMM_LEN);
        String::from_utf8_lossy(&self.comm[..end]).into_owned()
    }
}

impl TaskLayout {
    /// The task that runs on the virtual CPU whose per-CPU base is `gs_base`; `None` when the
    /// guest's memory does not hold one there. Allocates nothing.
    pub fn current(
        &self,
        tables: &PageTables,
        mem: &(impl PhysMemory + ?Sized),
        gs_base: u64,
    ) -> Option<Task> {
        let pointer = Gva(gs_base.wrapping_add(self.current_task));
        let task = Gva(tables.read_u64(mem, pointer).ok()?);
        let int = |offset: u64| {
            let mut raw = [0; 4];
            tables
                .read(mem, task.wrapping_add(offset), &mut raw)
                .ok()
                .map(|()| i32::from_le_bytes(raw))
        };
        let mut comm = [0; COMM_LEN];
        tables
            .read(mem, task.wrapping_add(self.comm), &mut comm)
            .ok()?;
        Some(Task {
            pid: int(self.pid)?,
            tgid: int(self.tgid)?,
            comm,
        })
    }
}
