//! The hidden region: memory we add to the guest, outside its memory map, for slots.
//!
//! Layout: the first page is a page table (level 1); the pages after it are slots, read and
//! execute only, each entered into that table when its first slot is taken. The region becomes
//! visible to the guest's kernel when that page table is entered into an empty entry of the kernel's
//! own level-2 table below the kernel image, where every process and every ±2 GiB displacement from
//! kernel text reaches it.
//!
//! States: `unmapped → mapped → unmapped …`. Invariants: an entry is filled only when it was empty
//! and cleared only when it still holds what we wrote; nothing is both writable and executable for
//! the guest; every byte of a free slot that the guest can reach is an int3.

#[cfg(test)]
mod tests;

use hvprobe_arch::insn::{SLOT_SIZE, SlotCode};
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::paging::{PageTables, WalkError, entry};
use hvprobe_arch::{Gpa, Gva};

const PAGE: u64 = 4096;
const EMPTY_TABLE: [u8; 4096] = [0; 4096];
const PAGE_OF_INT3: [u8; 4096] = [INT3; 4096];
const TABLE_SPAN: u64 = 2 << 20;
const INT3: u8 = 0xcc;
const SLOT: u64 = SLOT_SIZE as u64;
const SLOTS_PER_PAGE: u64 = PAGE / SLOT;

/// The range of kernel addresses below the kernel image (`__START_KERNEL_map` up to the lowest
/// place the image may lie, 16 MiB on): the kernel clears its page-table entries at boot
/// (`cleanup_highmap` in arch/x86/mm/init_64.c) and never uses them again.
pub const KERNEL_WINDOW: Window = Window {
    start: Gva(0xffff_ffff_8000_0000),
    end: Gva(0xffff_ffff_8100_0000),
};

/// Where in the guest's address space the region may be mapped; both ends multiples of 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address.
    pub start: Gva,
    /// First address past it.
    pub end: Gva,
}

/// Why the region could not be mapped or a slot not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HiddenError {
    /// Every entry of the window is taken.
    #[error("no empty page-table entry between {} and {} for the out-of-line slots", .0.start, .0.end)]
    WindowFull(Window),
    /// The kernel's page tables cannot be followed.
    #[error("the kernel's page tables cannot be followed to the slots' window")]
    Walk(#[from] WalkError),
    /// The memory behind the region is missing.
    #[error("the memory for out-of-line slots is missing")]
    Memory(#[from] OutOfRange),
    /// All slots are in use.
    #[error("all {0} out-of-line slots are in use: unregister probes that are stepped")]
    OutOfSlots(u64),
    /// The guest changed the page-table entry under us; it was left alone.
    #[error("the guest changed the page-table entry at {at} that maps the slots")]
    EntryChanged {
        /// Where the entry lies.
        at: Gpa,
    },
}

#[derive(Debug)]
struct Mapped {
    /// Guest address of the region's first slot page.
    base: Gva,
    entry_at: Gpa,
    entry: u64,
}

/// The hidden region of one machine.
#[derive(Debug)]
pub struct HiddenRegion {
    at: Gpa,
    slots: u64,
    window: Window,
    mapped: Option<Mapped>,
    /// Slots below this have been handed out at least once.
    fresh: u64,
    free: Vec<u64>,
}

impl HiddenRegion {
    /// A region over `size` bytes of guest physical memory at `at` (page-aligned), to be mapped
    /// somewhere in `window`. Nothing is touched until [`HiddenRegion::map`]. Whole pages are used,
    /// and at most 2 MiB: what one page table maps.
    #[must_use]
    pub fn new(at: Gpa, size: u64, window: Window) -> Self {
        let code_pages = (size.min(TABLE_SPAN) / PAGE).saturating_sub(1);
        Self {
            at,
            slots: code_pages * SLOTS_PER_PAGE,
            window,
            mapped: None,
            fresh: 0,
            free: Vec::new(),
        }
    }

    /// Maps the region if it is not mapped.
    ///
    /// # Errors
    /// When no entry is free or the tables cannot be followed; then nothing has changed.
    pub fn map(&mut self, mem: &dyn PhysMemory, tables: &PageTables) -> Result<(), HiddenError> {
        if self.mapped.is_some() {
            return Ok(());
        }
        let (start, entry_at) = self.empty_entry(mem, tables)?;
        mem.write(self.at, &EMPTY_TABLE)?;
        let value = self.at.0 | entry::PRESENT | entry::WRITABLE | entry::ACCESSED;
        mem.write(entry_at, &value.to_le_bytes())?;
        self.mapped = Some(Mapped {
            base: start.wrapping_add(PAGE),
            entry_at,
            entry: value,
        });
        Ok(())
    }

    fn empty_entry(
        &self,
        mem: &dyn PhysMemory,
        tables: &PageTables,
    ) -> Result<(Gva, Gpa), HiddenError> {
        let mut at = self.window.start;
        while at < self.window.end {
            let (entry_at, value) = tables.entry_at(mem, at, 2)?;
            if value == 0 {
                return Ok((at, entry_at));
            }
            at = at.wrapping_add(TABLE_SPAN);
        }
        Err(HiddenError::WindowFull(self.window))
    }

    /// Removes the region from the guest's address space. All slots must have been released.
    ///
    /// # Errors
    /// When the guest has changed the entry; it is left as it is.
    pub fn unmap(&mut self, mem: &dyn PhysMemory) -> Result<(), HiddenError> {
        let Some(mapped) = self.mapped.take() else {
            return Ok(());
        };
        self.fresh = 0;
        self.free.clear();
        let now = mem.read_u64(mapped.entry_at)?;
        // The processor may have set the dirty bit of an entry we wrote.
        if now & !entry::DIRTY != mapped.entry {
            return Err(HiddenError::EntryChanged {
                at: mapped.entry_at,
            });
        }
        mem.write(mapped.entry_at, &0_u64.to_le_bytes())?;
        Ok(())
    }

    /// Whether no slot is in use.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.fresh == self.free.len() as u64
    }

    /// Takes a free slot. The region must be mapped.
    ///
    /// # Errors
    /// When all are in use, or the region is not mapped.
    pub fn take(&mut self, mem: &dyn PhysMemory) -> Result<Gva, HiddenError> {
        let Some(mapped) = &self.mapped else {
            return Err(HiddenError::OutOfSlots(0));
        };
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.fresh < self.slots => {
                if self.fresh.is_multiple_of(SLOTS_PER_PAGE) {
                    self.add_page(mem, 1 + self.fresh / SLOTS_PER_PAGE)?;
                }
                self.fresh += 1;
                self.fresh - 1
            }
            None => return Err(HiddenError::OutOfSlots(self.slots)),
        };
        Ok(mapped.base.wrapping_add(index * SLOT))
    }

    /// Lets the guest see page `n` of the region, full of int3s. An entry that was not present is
    /// in no TLB, so nothing needs to be flushed (SDM vol. 3, 4.10.2.3).
    fn add_page(&self, mem: &dyn PhysMemory, n: u64) -> Result<(), HiddenError> {
        let frame = self.at.wrapping_add(n * PAGE);
        mem.write(frame, &PAGE_OF_INT3)?;
        let value = frame.0 | entry::PRESENT | entry::ACCESSED;
        mem.write(self.at.wrapping_add(n * 8), &value.to_le_bytes())?;
        Ok(())
    }

    /// Writes `code` into its slot; the rest of the slot stays int3.
    ///
    /// # Errors
    /// When the slot is none of ours.
    pub fn fill(&self, mem: &dyn PhysMemory, code: &SlotCode) -> Result<(), HiddenError> {
        let at = self.slot_gpa(code.at())?;
        mem.write(at, code.bytes())?;
        Ok(())
    }

    /// Gives `slot` back; its bytes become int3s.
    ///
    /// # Errors
    /// When the slot is none of ours.
    pub fn release(&mut self, mem: &dyn PhysMemory, slot: Gva) -> Result<(), HiddenError> {
        let at = self.slot_gpa(slot)?;
        mem.write(at, &[INT3; SLOT_SIZE])?;
        self.free.push((at.0 - self.at.0 - PAGE) / SLOT);
        Ok(())
    }

    fn slot_gpa(&self, slot: Gva) -> Result<Gpa, HiddenError> {
        self.mapped
            .as_ref()
            .and_then(|m| slot.offset_from(m.base))
            .filter(|offset| offset % SLOT == 0 && offset / SLOT < self.fresh)
            .map(|offset| self.at.wrapping_add(PAGE + offset))
            .ok_or(HiddenError::OutOfSlots(self.slots))
    }
}
