//! The current task and its identity.

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::Walker;

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
    /// Returns the command name up to its first NUL. Invalid UTF-8 is replaced.
    #[must_use]
    pub fn comm(&self) -> String {
        let end = self.comm.iter().position(|&b| b == 0).unwrap_or(COMM_LEN);
        String::from_utf8_lossy(&self.comm[..end]).into_owned()
    }
}

impl TaskLayout {
    /// Returns the address of the current task's `task_struct` on the virtual CPU whose per-CPU base is
    /// `gs_base`; `None` if the guest's memory cannot be read there. Allocates nothing.
    #[inline]
    pub fn pointer(
        &self,
        walker: &Walker,
        mem: &(impl PhysMemory + ?Sized),
        gs_base: u64,
    ) -> Option<Gva> {
        let pointer = Gva(gs_base.wrapping_add(self.current_task));
        walker.read_u64(mem, pointer).ok().map(Gva)
    }

    /// Reads the task whose `task_struct` is at `task`; `None` if one of the needed fields cannot be read.
    /// Allocates nothing.
    #[inline]
    pub fn read(
        &self,
        walker: &Walker,
        mem: &(impl PhysMemory + ?Sized),
        task: Gva,
    ) -> Option<Task> {
        if self.tgid != self.pid.wrapping_add(4) {
            return self.read_apart(walker, mem, task);
        }
        // The kernel has `pid` and `tgid` side by side, so both are read as one word.
        let offsets = [self.pid, self.comm, self.comm.wrapping_add(8)];
        let [both, first, second] = walker.read_words(mem, task, offsets).ok()?;
        let [a, b, c, d, rest @ ..] = both.to_le_bytes();
        let mut comm = [0; COMM_LEN];
        for (bytes, word) in comm.chunks_exact_mut(8).zip([first, second]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Some(Task {
            pid: i32::from_le_bytes([a, b, c, d]),
            tgid: i32::from_le_bytes(rest),
            comm,
        })
    }

    /// Like [`Self::read`], but for a layout in which `tgid` does not directly follow `pid`.
    #[inline(never)]
    fn read_apart(
        &self,
        walker: &Walker,
        mem: &(impl PhysMemory + ?Sized),
        task: Gva,
    ) -> Option<Task> {
        let (mut pid, mut tgid, mut comm) = ([0; 4], [0; 4], [0; COMM_LEN]);
        let read = |offset, into: &mut [u8]| walker.read(mem, task.wrapping_add(offset), into);
        read(self.pid, &mut pid).ok()?;
        read(self.tgid, &mut tgid).ok()?;
        read(self.comm, &mut comm).ok()?;
        Some(Task {
            pid: i32::from_le_bytes(pid),
            tgid: i32::from_le_bytes(tgid),
            comm,
        })
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Gpa;
    use hvprobe_arch::mem::PhysMemory;
    use hvprobe_fixtures::{Mapper, Memory, tables};
    use proptest::prelude::*;

    use super::*;

    const PAGE: Gva = Gva(0xffff_ffff_82a0_0000);
    const FRAME: Gpa = Gpa(0x3_0000);
    const LAYOUT: TaskLayout = TaskLayout {
        current_task: 0x20,
        pid: 0x10,
        tgid: 0x14,
        comm: 0x18,
    };

    /// Creates a memory with one mapped page, in which `task` is the pointer to the current task.
    fn memory(task: u64) -> Memory {
        let mem = Memory::new(0);
        Mapper::new(&mem).map(PAGE, FRAME);
        mem.write(FRAME.wrapping_add(0x20), &task.to_le_bytes())
            .unwrap();
        mem
    }

    fn find(layout: &TaskLayout, mem: &Memory, gs_base: u64) -> Option<Task> {
        let walker = Walker::new(tables());
        let task = layout.pointer(&walker, mem, gs_base)?;
        layout.read(&walker, mem, task)
    }

    fn current(mem: &Memory) -> Option<Task> {
        find(&LAYOUT, mem, PAGE.0)
    }

    #[test]
    fn task_is_found_through_the_per_cpu_pointer() {
        let mem = memory(PAGE.0 + 0x100);
        mem.write(FRAME.wrapping_add(0x110), &(-1_i32).to_le_bytes())
            .unwrap();
        mem.write(FRAME.wrapping_add(0x114), &7_i32.to_le_bytes())
            .unwrap();
        mem.write(FRAME.wrapping_add(0x118), b"sixteen letters!")
            .unwrap();
        let task = current(&mem).unwrap();
        assert_eq!((task.pid, task.tgid), (-1, 7));
        assert_eq!(task.comm(), "sixteen letters!");
    }

    #[test]
    fn offset_from_the_base_wraps_as_the_processor_adds() {
        let mem = memory(PAGE.0);
        let layout = TaskLayout {
            current_task: 0x20_u64.wrapping_sub(5),
            ..LAYOUT
        };
        assert!(find(&layout, &mem, PAGE.0 + 5).is_some());
    }

    #[test]
    fn task_that_is_not_wholly_mapped_is_none() {
        for task in [0, 1, PAGE.0 - 0x18, PAGE.0 + 0x1000 - 0x20, u64::MAX - 0x14] {
            assert_eq!(current(&memory(task)), None, "{task:#x}");
        }
    }

    #[test]
    fn name_ends_at_its_first_nul_and_need_not_be_text() {
        let named = |comm: &[u8; COMM_LEN]| {
            let comm = *comm;
            let (pid, tgid) = (1, 1);
            Task { pid, tgid, comm }.comm()
        };
        assert_eq!(named(b"sh\0garbage after"), "sh");
        assert_eq!(named(&[0; COMM_LEN]), "");
        assert_eq!(named(&[0xff; COMM_LEN]), "\u{fffd}".repeat(COMM_LEN));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(
            task: u64, gs_base: u64, current_task: u64, pid: u64, tgid: u64, comm: u64
        ) {
            let layout = TaskLayout { current_task, pid, tgid, comm };
            let mem = memory(task);
            let _ = find(&layout, &mem, gs_base);
            let _ = find(&layout, &mem, PAGE.0.wrapping_sub(current_task).wrapping_add(0x20));
        }
    }
}
