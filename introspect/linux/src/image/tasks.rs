//! Where an image keeps its tasks and the number of a processor: from its types, and from its code.
//!
//! What is kept true: nothing is taken from code on the word of one function alone where there are
//! two, nor if a function loads more than one thing that it could be. The functions are system calls, which every kernel
//! has: checked on 5.10, 6.1, 6.12 and 7.2, where they tell the same as types and symbols do.

use hvprobe_arch::Gva;
use hvprobe_arch::insn::per_cpu_loads;
use memchr::memmem;

use super::elf::Elf;
use crate::bytes::u64_at;
use crate::symbols::Symbols;
use crate::types::{BtfError, Types};

/// Where a task's identity is found from the per-CPU base on. Offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLayout {
    /// What to add, modulo 2^64, to a CPU's per-CPU base (`GS_BASE` in kernel mode) for the
    /// address of its pointer to the current `task_struct`.
    pub current_task: u64,
    /// The `i32` `pid` in `task_struct`: the thread's id.
    pub pid: u64,
    /// The `i32` `tgid`: the process's id.
    pub tgid: u64,
    /// The 16 bytes of `comm`, NUL-terminated.
    pub comm: u64,
}

/// What an image tells of its tasks without types. The rest only a guest shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskClues {
    /// As in [`TaskLayout`].
    pub current_task: u64,
    /// The first task, which is part of the image: the idle task of the first processor.
    pub init_task: Gva,
    /// As in [`TaskLayout`].
    pub comm: u64,
}

/// System calls that hand the current task on, and do nothing else with it.
const OF_CURRENT: [&str; 2] = ["__x64_sys_getpid", "__x64_sys_gettid"];
/// The system call that asks for the number of the processor.
const OF_CPU: [&str; 1] = ["__x64_sys_getcpu"];
/// What the first task is called in the image (`INIT_TASK_COMM` in include/linux/init_task.h), in all of
/// its `comm`.
const INIT_COMM: &[u8; 16] = b"swapper\0\0\0\0\0\0\0\0\0";
/// More than any `task_struct` has before its `comm`.
const LONGEST: usize = 1 << 14;

/// What to add to a CPU's per-CPU base for the address of its variable `name`, which has `size`
/// bytes: one of its own up to 6.1 and from 6.15 on; in between in a structure.
fn per_cpu(btf: &Types, symbols: &Symbols, name: &str, size: u64) -> Result<u64, BtfError> {
    match symbols.address_of(name) {
        Some(at) => Ok(at.0),
        None => {
            let at = symbols
                .address_of("pcpu_hot")
                .or_else(|| symbols.address_of("const_pcpu_hot"))
                .ok_or(BtfError::NoCurrentTask)?;
            Ok(at.0.wrapping_add(btf.field("pcpu_hot", name, size)?))
        }
    }
}

/// The layout that the types tell.
pub(super) fn layout(btf: &Types, symbols: &Symbols) -> Result<TaskLayout, BtfError> {
    Ok(TaskLayout {
        current_task: per_cpu(btf, symbols, "current_task", 8)?,
        pid: btf.field("task_struct", "pid", 4)?,
        tgid: btf.field("task_struct", "tgid", 4)?,
        comm: btf.field("task_struct", "comm", 16)?,
    })
}

/// What the code and the data tell.
pub(super) fn clues(elf: &Elf<'_>, symbols: &Symbols) -> Option<TaskClues> {
    let current_task = loaded(elf, symbols, &OF_CURRENT, 8)?;
    // The per-CPU data of the first processor, whose task it is from the beginning.
    let init_task = Gva(u64_at(elf.read(Gva(current_task), 8)?, 0)?);
    let task = elf.read_up_to(init_task, LONGEST);
    let mut found = memmem::find_iter(task, INIT_COMM);
    let comm = found.next().filter(|_| found.next().is_none())?;
    Some(TaskClues {
        current_task,
        init_task,
        comm: u64::try_from(comm).ok()?,
    })
}

/// Where the number of a processor is beyond its per-CPU base.
pub(super) fn cpu_number(elf: &Elf<'_>, symbols: &Symbols, btf: Option<&Types>) -> Option<u64> {
    let own = symbols.address_of("cpu_number").map(|at| at.0);
    own.or_else(|| per_cpu(btf?, symbols, "cpu_number", 4).ok())
        .or_else(|| loaded(elf, symbols, &OF_CPU, 4))
}

/// The one place in per-CPU data that each of `functions` loads `size` bytes from.
fn loaded(elf: &Elf<'_>, symbols: &Symbols, functions: &[&str], size: usize) -> Option<u64> {
    let mut found = None;
    for function in functions {
        let function = symbols.lookup(function).ok()?;
        let code = elf.read(function.addr, usize::try_from(function.size).ok()?)?;
        let loads = per_cpu_loads(code, function.addr);
        let mut here = loads.iter().filter(|load| load.size == size);
        let at = here.next()?.at;
        if here.any(|load| load.at != at) || found.is_some_and(|found| found != at) {
            return None;
        }
        found = Some(at);
    }
    found
}

#[cfg(test)]
mod tests;
