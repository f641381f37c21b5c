//! Determines the layout of tasks, from the kernel's types or from the guest's memory, and checks it against
//! the guest.
//!
//! Invariant: a [`TaskLayout`] returned here fits the guest at the time when its tasks are first read. That is just
//! before the first program runs: the current task has number 1, and still has the name from the image. A layout
//! that does not fit is not used, whether it comes from the types or from memory.
//!
//! Without types (CONFIG_DEBUG_INFO_BTF), the image shows where the current task and the first task are, and the
//! offset of a task's name ([`TaskClues`]). The first task heads a list of all processes. The list is recognised
//! because each member has a name at the same offset as the first task. All process numbers differ, 0 and 1 come
//! first, and the first thread of each process has the number of the process. This identifies `pid` and `tgid`,
//! which are side by side. Checked on 5.10, 6.1, 6.12 and 7.2.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{PageTables, Walker};

use super::current::Task;
use crate::image::{KernelImage, TaskClues, TaskLayout};

/// Why the layout of the guest's tasks cannot be determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskUnknown {
    /// Neither types nor code show where the current task is.
    #[error(
        "the kernel has no type information (CONFIG_DEBUG_INFO_BTF), and its code does not show where the \
         current task is"
    )]
    NoClues,
    /// The list of tasks or the offset of their numbers is not found, or is ambiguous.
    #[error(
        "the kernel has no type information (CONFIG_DEBUG_INFO_BTF), and its tasks do not show where they \
         have their {0}"
    )]
    NoEvidence(&'static str),
    /// The layout does not fit the guest.
    #[error(
        "the layout of `task_struct` does not fit the guest: the first process is not found by it"
    )]
    Unfit,
}

/// The number of the first process.
const FIRST: i32 = 1;
/// Prefix of the names of the idle tasks, and of the first process before it runs a program.
const BOOTING: &[u8] = b"swapper";
/// Maximum number of tasks on the list.
const MOST: usize = 1 << 12;
/// Minimum number of tasks on the list; a shorter list proves nothing.
const FEWEST: usize = 4;

impl TaskLayout {
    /// Determines the layout of tasks in a guest that is about to run its first program on the processor whose
    /// per-CPU base is `gs_base`.
    ///
    /// # Errors
    /// If the layout cannot be determined, or does not fit the guest.
    pub fn of_guest(
        image: &KernelImage,
        tables: PageTables,
        mem: &(impl PhysMemory + ?Sized),
        gs_base: u64,
    ) -> Result<Self, TaskUnknown> {
        /// Maximum number of attempts to read the tasks. An attempt may fail because other processors are changing
        /// the list.
        const TRIES: usize = 5;
        let guest = Guest {
            walker: Walker::new(tables),
            mem,
        };
        let layout = match (image.task_layout(), image.task_clues()) {
            (Ok(layout), _) => layout,
            (Err(_), None) => return Err(TaskUnknown::NoClues),
            (Err(_), Some(clues)) => {
                let mut shown = guest.shows(clues);
                for _ in 1..TRIES {
                    shown = shown.or_else(|_| guest.shows(clues));
                }
                shown?
            }
        };
        guest
            .confirms(layout, gs_base)
            .then_some(layout)
            .ok_or(TaskUnknown::Unfit)
    }
}

struct Guest<'a, M: ?Sized> {
    walker: Walker,
    mem: &'a M,
}

impl<M: PhysMemory + ?Sized> Guest<'_, M> {
    /// Returns whether the current task, read with `layout`, is the first process and has not yet run a program.
    fn confirms(&self, layout: TaskLayout, gs_base: u64) -> bool {
        self.walker.begin();
        let current = layout.pointer(&self.walker, self.mem, gs_base);
        let task = current.and_then(|current| layout.read(&self.walker, self.mem, current));
        task.is_some_and(|Task { pid, tgid, comm }| {
            (pid, tgid) == (FIRST, FIRST) && comm.starts_with(BOOTING)
        })
    }

    /// Determines the layout from the guest's tasks themselves.
    fn shows(&self, clues: TaskClues) -> Result<TaskLayout, TaskUnknown> {
        let missing = TaskUnknown::NoEvidence;
        self.walker.begin();
        let len = usize::try_from(clues.comm).map_err(|_| missing("names"))?;
        let first = self.bytes(clues.init_task, len).ok_or(missing("names"))?;
        let links = (0..clues.comm).step_by(8);
        let tasks = links.zip(first.chunks_exact(8)).find_map(|(link, word)| {
            let next = Gva(u64::from_le_bytes(word.try_into().ok()?));
            self.list(clues, link, next)
        });
        let tasks = tasks.ok_or(missing("list"))?;
        let mut heads = Vec::with_capacity(tasks.len());
        for task in &tasks {
            heads.push(self.bytes(*task, len).ok_or(missing("list"))?);
        }
        let numbers = |at: usize| {
            let number = |head: &Vec<u8>, at: usize| {
                let bytes = head.get(at..at + 4)?;
                Some(i32::from_le_bytes(bytes.try_into().ok()?))
            };
            let mut seen = BTreeSet::new();
            // Tasks are listed in the order of their creation, except that two created at the same time may be
            // swapped.
            heads.iter().enumerate().all(|(n, head)| {
                let (pid, tgid) = (number(head, at), number(head, at + 4));
                let pid = pid.filter(|pid| Some(*pid) == tgid && seen.insert(*pid));
                pid.is_some_and(|pid| match n {
                    0 | 1 => usize::try_from(pid) == Ok(n),
                    _ => pid > FIRST,
                })
            })
        };
        let mut places = (0..len.saturating_sub(8))
            .step_by(4)
            .filter(|at| numbers(*at));
        let place = places.next().filter(|_| places.next().is_none());
        let pid = place
            .and_then(|at| u64::try_from(at).ok())
            .ok_or(missing("numbers"))?;
        Ok(TaskLayout {
            current_task: clues.current_task,
            pid,
            tgid: pid + 4,
            comm: clues.comm,
        })
    }

    /// Returns the tasks on the list whose head is the `list_head` at offset `link` in the first task; the first
    /// task is included. `next` is the link to which the head points. `None` if this is not a list of tasks.
    fn list(&self, clues: TaskClues, link: u64, mut next: Gva) -> Option<Vec<Gva>> {
        let head = clues.init_task.wrapping_add(link);
        let mut before = head;
        let mut tasks = vec![clues.init_task];
        while next != head {
            let task = next.wrapping_sub(link);
            let back = self.walker.read_u64(self.mem, next.wrapping_add(8)).ok()?;
            let is_task = back == before.0 && self.has_name(task.wrapping_add(clues.comm));
            (is_task && tasks.len() < MOST).then_some(())?;
            tasks.push(task);
            before = next;
            next = Gva(self.walker.read_u64(self.mem, next).ok()?);
        }
        (tasks.len() >= FEWEST).then_some(tasks)
    }

    /// Returns whether the bytes at `at` are the name of a task: printable characters, terminated by a NUL.
    fn has_name(&self, at: Gva) -> bool {
        let Some(comm) = self.bytes(at, super::current::COMM_LEN) else {
            return false;
        };
        let end = comm.iter().position(|byte| *byte == 0);
        end.is_some_and(|end| {
            end > 0 && comm[..end].iter().all(|byte| (b' '..=b'~').contains(byte))
        })
    }

    fn bytes(&self, at: Gva, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.walker.read(self.mem, at, &mut bytes).ok()?;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests;
