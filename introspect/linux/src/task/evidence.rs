//! What tasks of a guest look like, from its types or from what it shows, and held against the guest.
//!
//! What is kept true: a [`TaskLayout`] that comes from here fits the guest as it ran the first time
//! its tasks were looked at. Just before the first program is run the task that runs is number 1, and still has the
//! name that it has from the image. A layout that does not fit is not used, wherever it comes from.
//!
//! Without types (CONFIG_DEBUG_INFO_BTF) the image tells where the current and the first task are, and
//! where a task has its name ([`TaskClues`]). The first task heads a list of all processes, which is
//! recognised by that each member has a name where the first has. All their numbers are different, 0
//! and 1 come first, and the first thread of each has that of its process: `pid` and `tgid`, which are side
//! by side. Checked on 5.10, 6.1, 6.12 and 7.2.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{PageTables, Walker};

use super::current::Task;
use crate::image::{KernelImage, TaskClues, TaskLayout};

/// Why the guest's tasks cannot be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskUnknown {
    /// Neither types nor code lead to the current task.
    #[error(
        "the kernel has no type information (CONFIG_DEBUG_INFO_BTF), and its code does not tell where the \
         current task is"
    )]
    NoClues,
    /// No list of tasks, or several things that could be their numbers.
    #[error(
        "the kernel has no type information (CONFIG_DEBUG_INFO_BTF), and its tasks do not tell where they \
         have their {0}"
    )]
    NoEvidence(&'static str),
    /// The layout is not the guest's.
    #[error(
        "the layout of `task_struct` does not fit the guest: the first process is not found by it"
    )]
    Unfit,
}

/// The number of the first process.
const FIRST: i32 = 1;
/// What the names of the idle tasks, and of the first process before it runs a program, begin with.
const BOOTING: &[u8] = b"swapper";
/// The most tasks that are looked at.
const MOST: usize = 1 << 12;
/// Fewer do not prove anything.
const FEWEST: usize = 4;

impl TaskLayout {
    /// The layout of the guest that is about to run its first program, on the processor whose per-CPU
    /// base is `gs_base`.
    ///
    /// # Errors
    /// When nothing tells, or the guest tells otherwise.
    pub fn of_guest(
        image: &KernelImage,
        tables: PageTables,
        mem: &(impl PhysMemory + ?Sized),
        gs_base: u64,
    ) -> Result<Self, TaskUnknown> {
        /// Other processors may be changing the list.
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
    fn confirms(&self, layout: TaskLayout, gs_base: u64) -> bool {
        self.walker.begin();
        let current = layout.pointer(&self.walker, self.mem, gs_base);
        let task = current.and_then(|current| layout.read(&self.walker, self.mem, current));
        task.is_some_and(|Task { pid, tgid, comm }| {
            (pid, tgid) == (FIRST, FIRST) && comm.starts_with(BOOTING)
        })
    }

    /// The layout that the tasks show.
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
            // They are in the order in which they were made, but for two that were made at once.
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

    /// The tasks on the list whose head is the `list_head` that is `link` bytes into the first task and
    /// leads to `next`, that task included; `None` if that is no list of tasks.
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

    /// Whether there is a name at `at`: text, and zeroes up to its end.
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
