//! Unwinds a stack that a detour has copied, when the detour's record is read.
//!
//! Invariant: the copy contains the whole stack, so guest memory is read only for the unwind tables of the guest's
//! modules. Detours copy stacks only while no return probe replaces return addresses. So an address in the code of
//! return probes is not a return address, and the stack ends there.

use std::sync::Arc;

use hvprobe_arch::detour::StackCopy;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::{Gva, Regs};
use hvprobe_linux::unwind::{Start, Surroundings};

use crate::event::Captured;
use crate::record::Follower;
use crate::region::KERNEL_WINDOW;
use crate::stack_trace::walk;
use crate::table::ProbeTable;

/// What is needed to unwind copied stacks.
#[derive(Debug)]
pub struct Stacks {
    /// Has the unwinder. Also translates addresses in copies of instructions, because a hit may have interrupted a
    /// copy.
    pub table: Arc<ProbeTable>,
    /// The kernel's own page tables.
    pub kernel: PageTables,
}

impl Follower for Stacks {
    fn follow(
        &self,
        copy: &StackCopy<'_>,
        regs: &Regs,
        mem: &dyn PhysMemory,
        most: u8,
        into: &mut Captured,
    ) {
        let start = Start {
            regs,
            returned: false,
        };
        let guest = Copied {
            copy,
            stacks: self,
            mem,
        };
        walk(self.table.unwinder(), &guest, into, most, start);
    }
}

/// The parts of the guest's state at the hit that unwinding needs.
struct Copied<'a> {
    copy: &'a StackCopy<'a>,
    stacks: &'a Stacks,
    mem: &'a dyn PhysMemory,
}

impl Surroundings for Copied<'_> {
    fn word(&self, at: Gva) -> Option<u64> {
        let copied = self.copy.word(at);
        copied.or_else(|| self.stacks.kernel.read_u64(self.mem, at).ok())
    }

    fn returns_to(&self, found: Gva, _slot: Gva) -> Option<Gva> {
        let table = &self.stacks.table;
        let is_known = !KERNEL_WINDOW.contains(found) || table.stands_for(found).is_some();
        is_known.then_some(found)
    }

    fn in_place(&self, at: Gva) -> (Gva, u64) {
        self.stacks.table.stands_for(at).unwrap_or((at, 0))
    }
}
