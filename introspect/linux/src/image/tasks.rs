//! Finds where a kernel keeps the current task and the number of a processor, from the image's types or from its
//! code.
//!
//! Invariants: an offset found in code is used only if all functions that should load the same value agree on it,
//! and if none of them loads another candidate. These functions are system calls, which every kernel has. Checked
//! on 5.10, 6.1, 6.12 and 7.2, where code, types and symbols agree.

use hvprobe_arch::Gva;
use hvprobe_arch::insn::per_cpu_loads;
use memchr::memmem;

use super::elf::Elf;
use crate::bytes::u64_at;
use crate::symbols::Symbols;
use crate::types::{BtfError, Types};

/// Where the identity of the current task is, starting from a CPU's per-CPU base. All offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLayout {
    /// Offset, modulo 2^64, from a CPU's per-CPU base (`GS_BASE` in kernel mode) to its pointer to the current
    /// `task_struct`.
    pub current_task: u64,
    /// Offset in `task_struct` of the `i32` `pid`: the thread's id.
    pub pid: u64,
    /// Offset in `task_struct` of the `i32` `tgid`: the process's id.
    pub tgid: u64,
    /// Offset in `task_struct` of the 16 bytes of `comm`, NUL-terminated.
    pub comm: u64,
}

/// What an image without types shows about its tasks. The rest can only be seen in a running guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskClues {
    /// The same as [`TaskLayout::current_task`].
    pub current_task: u64,
    /// Address of the first task: the idle task of the first processor, which is part of the image.
    pub init_task: Gva,
    /// The same as [`TaskLayout::comm`].
    pub comm: u64,
}

/// System calls that load the pointer to the current task, and only pass it on.
const OF_CURRENT: [&str; 2] = ["__x64_sys_getpid", "__x64_sys_gettid"];
/// The system call that returns the number of the processor.
const OF_CPU: [&str; 1] = ["__x64_sys_getcpu"];
/// The name of the first task in the image (`INIT_TASK_COMM` in include/linux/init_task.h), padded to the
/// length of `comm`.
const INIT_COMM: &[u8; 16] = b"swapper\0\0\0\0\0\0\0\0\0";
/// Number of bytes from the start of `task_struct` in which `comm` is searched for; every kernel has it there.
const LONGEST: usize = 1 << 14;

/// Returns the offset from a CPU's per-CPU base to the CPU's variable `name` of `size` bytes. Up to 6.1 and from
/// 6.15 on, the variable has a symbol of its own; in between, it is a member of a structure.
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

/// Returns the layout that the types describe.
pub(super) fn layout(btf: &Types, symbols: &Symbols) -> Result<TaskLayout, BtfError> {
    Ok(TaskLayout {
        current_task: per_cpu(btf, symbols, "current_task", 8)?,
        pid: btf.field("task_struct", "pid", 4)?,
        tgid: btf.field("task_struct", "tgid", 4)?,
        comm: btf.field("task_struct", "comm", 16)?,
    })
}

/// Returns the clues in the code and data of the image.
pub(super) fn clues(elf: &Elf<'_>, symbols: &Symbols) -> Option<TaskClues> {
    let current_task = loaded(elf, symbols, &OF_CURRENT, 8)?;
    // The image holds the initial per-CPU data of the first processor. In it, the current task is already the first
    // task.
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

/// Returns the offset from the per-CPU base to the number of the processor.
pub(super) fn cpu_number(elf: &Elf<'_>, symbols: &Symbols, btf: Option<&Types>) -> Option<u64> {
    let own = symbols.address_of("cpu_number").map(|at| at.0);
    own.or_else(|| per_cpu(btf?, symbols, "cpu_number", 4).ok())
        .or_else(|| loaded(elf, symbols, &OF_CPU, 4))
}

/// Returns the one offset in per-CPU data from which all of `functions` load `size` bytes. `None` if a function has
/// no such load, or if the offsets differ.
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
