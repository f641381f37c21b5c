//! Reads the types of modules.
//!
//! Invariants: a module's types are read at most once for each [`ModuleList`], and only when they are first needed:
//! those of most modules never are. Like everything about a module, they are what the guest claims. The types of
//! all modules of one list share one budget.
//!
//! The kernel frees a module's section `.BTF` once the module's init function has run. A copy exists from before
//! that function runs until the module is unloaded, on the list `btf_modules` in kernel/bpf/btf.c. The type ids in
//! the copy continue where those of the kernel end, even if they were others in the file.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;

use super::error::{ModuleError, NoModuleTypes};
use super::layout::TypesEntry;
use super::list::{Module, ModuleList};
use super::read::{Guest, ModuleReader};
use crate::types::Types;

impl ModuleReader {
    /// Returns whether this kernel keeps types of its modules.
    #[must_use]
    pub fn has_types(&self) -> bool {
        self.types.is_some() && self.layout.types_entry.is_some()
    }

    /// Reads the types of `module`, which must be in `modules`, unless they were read before. `kernel` are the
    /// types of the kernel that loaded it. Afterwards, [`Module::types`] returns the types, or the reason why there
    /// are none.
    pub fn read_types<M: PhysMemory + ?Sized>(
        &self,
        modules: &ModuleList,
        module: &Module,
        kernel: &Arc<Types>,
        tables: &PageTables,
        mem: &M,
    ) {
        module.types.get_or_init(|| {
            let left = modules.types_left.load(Ordering::Relaxed);
            let mut guest = Guest::with(left, tables, mem);
            let data = self.types_of(module.at, &mut guest);
            // What was read counts even if it led nowhere.
            modules.types_left.fetch_min(guest.left, Ordering::Relaxed);
            let types = Types::split(Arc::clone(kernel), &data?);
            types.map(Arc::new).map_err(NoModuleTypes::Malformed)
        });
    }

    fn types_of<M: PhysMemory + ?Sized>(
        &self,
        module: Gva,
        guest: &mut Guest<'_, M>,
    ) -> Result<Vec<u8>, NoModuleTypes> {
        let (Some(head), Some(entry)) = (self.types, self.layout.types_entry) else {
            return Err(NoModuleTypes::NotKept);
        };
        let TypesEntry { next, types, .. } = entry;
        for link in guest.list(head)? {
            let at = link.wrapping_sub(next);
            if word(guest, at, entry.module)? != module.0 {
                continue;
            }
            let types = Gva(word(guest, at, types)?);
            let start = Gva(word(guest, types, entry.data.start)?);
            // The length is a u32; the upper half of the word is the next field.
            let len = word(guest, types, entry.data.count)? & u64::from(u32::MAX);
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let data = guest.bytes(start, len)?;
            return Ok(data.ok_or(ModuleError::Unreadable { at: start })?);
        }
        Err(NoModuleTypes::None)
    }
}

fn word<M: PhysMemory + ?Sized>(
    guest: &Guest<'_, M>,
    at: Gva,
    offset: u64,
) -> Result<u64, ModuleError> {
    let at = at.wrapping_add(offset);
    guest.u64(at).ok_or(ModuleError::Unreadable { at })
}
