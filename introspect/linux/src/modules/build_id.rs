//! Reads the build id of a loaded module.
//!
//! Invariants: a build id is the guest's claim, like everything about a module. Only a bounded number of bytes
//! of notes is read, and only from the module's own memory.
//!
//! The kernel records where the notes of a module are for `/sys/module/NAME/notes` (`add_notes_attrs` in
//! kernel/module/sysfs.c), before the module's init function runs.

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;

use super::list::Module;
use super::read::{Guest, ModuleReader};
use crate::notes::build_id;

/// Maximum number of note sections to read; modules have two or three.
const MOST_NOTES: u64 = 8;
/// Maximum length of a note section, in bytes; those of modules are short.
const LONGEST_NOTES: u64 = 4096;
/// Maximum number of bytes to read: more than all notes within the limits above have together.
const BUDGET: usize = 1 << 20;

impl ModuleReader {
    /// Returns the build id of `module`; `None` if the kernel does not keep it, or it cannot be read.
    #[must_use]
    pub fn build_id<M: PhysMemory + ?Sized>(
        &self,
        module: &Module,
        tables: &PageTables,
        mem: &M,
    ) -> Option<Vec<u8>> {
        let notes = self.layout.notes?;
        let mut guest = Guest::with(BUDGET, tables, mem);
        let all = guest.u64(module.address().wrapping_add(notes.all))?;
        let first = Gva(all).wrapping_add(notes.first);
        (0..MOST_NOTES).find_map(|number| {
            let note = first.wrapping_add(number * notes.len);
            let start = Gva(guest.u64(note.wrapping_add(notes.start))?);
            let len = guest.u64(note.wrapping_add(notes.size))?;
            let fits = len <= LONGEST_NOTES && module.has(start);
            let len = usize::try_from(len).ok().filter(|_| fits)?;
            let bytes = guest.bytes(start, len).ok()??;
            build_id(&bytes).map(<[u8]>::to_vec)
        })
    }
}
