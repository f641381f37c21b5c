//! The hidden region: memory we add to the guest, outside its memory map.
//!
//! | page | what                                                        | the guest may    |
//! |------|-------------------------------------------------------------|------------------|
//! | 0    | the page table (level 1) that maps the others               | not reach it     |
//! | 1    | the *stubs* of the exception window, and the trampoline     | read and execute |
//! | 2    | the interrupt descriptor table of the exception window      | read and execute |
//! | 3 …  | slots, each page entered when its first slot is taken       | read and execute |
//!
//! The memory for detours follows these 2 MiB ([`crate::code::detours`]).
//!
//! The region becomes visible to the guest's kernel when its page table is entered into an empty entry of the
//! kernel's own level-2 table below the kernel image. There every process, and every ±2 GiB displacement from
//! kernel text, reaches it.
//!
//! The *exception window* is active while a stepped copy runs: the virtual CPU's IDTR points at page 2, whose gates
//! are copies of the guest's own with the stubs as handlers. A stub is an `out` to our port, so an exception of the
//! copy exits to the host first. The *trampoline* is also such an `out`. Functions with a return probe return to
//! it, so on no host does their return depend on the guest's #BP entry.
//!
//! Where the guest uses indirect branch tracking (IBT), exceptions may only lead to an `endbr64`, so stubs
//! begin with one. Nothing else here is the target of an indirect branch: the trampoline and the stubs of calls
//! are reached by returns, detours by relative jumps, and slots by the host.
//!
//! States: `unmapped → mapped → unmapped …`. Invariants: an entry is filled only when it was empty and cleared
//! only when it still holds our value; no page is both writable and executable for the guest; every byte of a
//! free slot that the guest can reach is an int3; once the trampoline has replaced a return address, the region
//! stays mapped. Processors may cache the old translation, so an address where the region was mapped is never
//! used for anything else of ours, and the region is mapped there again.

use hvprobe_arch::insn::{ENDBR64, SLOT_SIZE, SlotCode};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{PageTables, entry};
use hvprobe_arch::trap::{GATE_SIZE, IDT_SIZE, INT3, VECTORS};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_hit::region::{
    CODE_PAGE, Fixtures, IDT_PAGE, OUT, RingPlace, STUB, TABLE_SPAN, TRAMPOLINE, Window,
};

use crate::code::detours::{self, Detours};
use crate::code::error::HiddenError;
use crate::code::extent::empty_entries;

const PAGE: u64 = 4096;
const EMPTY_TABLE: [u8; 4096] = [0; 4096];
const PAGE_OF_INT3: [u8; 4096] = [INT3; 4096];
const SLOT: u64 = SLOT_SIZE as u64;
const SLOTS_PER_PAGE: u64 = PAGE / SLOT;
const SLOT_PAGES: u64 = 3;

/// Returns the first and the last slot of a full-size region at each of the two outermost places where the region
/// may be mapped: the start of the window, and its end if all other entries are in use.
#[must_use]
pub fn outermost_slots(window: &Window) -> [[Gva; 2]; 2] {
    let at_end = window.end.wrapping_sub(TABLE_SPAN);
    [window.start, at_end].map(|start| {
        let first = start.wrapping_add(SLOT_PAGES * PAGE);
        [first, start.wrapping_add(TABLE_SPAN - SLOT)]
    })
}

#[derive(Debug)]
struct Mapped {
    fixtures: Fixtures,
    /// Guest address of the first slot page.
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
    /// Address at which the region was mapped last.
    home: Option<Gva>,
    pinned: bool,
    /// Number of slots at the beginning that have been handed out at least once.
    first: u64,
    /// Number of slots at the end that have been handed out at least once.
    last: u64,
    /// Indexes of the slots that were released.
    free: Vec<u64>,
    /// `None` where the region is too small for detours.
    pub(crate) detours: Option<Detours>,
}

impl HiddenRegion {
    /// Size of a region with room for detours, in bytes. Such a region begins at a multiple of 2 MiB.
    pub const FULL_SIZE: u64 = TABLE_SPAN + detours::SIZE;

    /// Creates a region over `size` bytes of guest physical memory at `at` (page-aligned), to be mapped at an
    /// address in `window`. Touches nothing until [`HiddenRegion::map`]. Uses whole pages: at most 2 MiB, the
    /// range of one page table, or [`HiddenRegion::FULL_SIZE`] with detours.
    #[must_use]
    pub fn new(at: Gpa, size: u64, window: Window) -> Self {
        let code_pages = (size.min(TABLE_SPAN) / PAGE).saturating_sub(SLOT_PAGES);
        Self {
            at,
            slots: code_pages * SLOTS_PER_PAGE,
            window,
            mapped: None,
            home: None,
            pinned: false,
            first: 0,
            last: 0,
            free: Vec::new(),
            detours: (size >= Self::FULL_SIZE)
                .then(|| Detours::new(at.wrapping_add(TABLE_SPAN), window)),
        }
    }

    /// Returns the addresses of the ring that detours record into; `None` where there are no detours.
    #[must_use]
    pub fn ring(&self) -> Option<RingPlace> {
        Some(self.detours.as_ref()?.place())
    }

    /// Maps the region unless it is mapped.
    ///
    /// # Errors
    /// When no entry is free or the page tables cannot be walked; then nothing has changed.
    pub fn map(&mut self, mem: &dyn PhysMemory, tables: &PageTables) -> Result<(), HiddenError> {
        if self.mapped.is_some() {
            return Ok(());
        }
        let start = self.empty_entry(mem, tables)?;
        let (entry_at, _) = tables.entry_at(mem, start, 2)?;
        mem.write(self.at, &EMPTY_TABLE)?;
        self.add_page(mem, CODE_PAGE)?;
        let stubs = self.at.wrapping_add(CODE_PAGE * PAGE);
        let stub = [&ENDBR64[..], &OUT].concat();
        for vector in 0..VECTORS {
            mem.write(stubs.wrapping_add(vector * STUB), &stub)?;
        }
        mem.write(stubs.wrapping_add(TRAMPOLINE), &OUT)?;
        let value = self.at.0 | entry::PRESENT | entry::WRITABLE | entry::ACCESSED;
        mem.write(entry_at, &value.to_le_bytes())?;
        self.home = Some(start);
        if let Some(detours) = &mut self.detours {
            detours.leave(start);
        }
        self.mapped = Some(Mapped {
            fixtures: Fixtures::new(start),
            base: start.wrapping_add(SLOT_PAGES * PAGE),
            entry_at,
            entry: value,
        });
        Ok(())
    }

    /// Returns the address at which the region was mapped last if its entry is still empty, otherwise the first
    /// address with an empty entry.
    fn empty_entry(&self, mem: &dyn PhysMemory, tables: &PageTables) -> Result<Gva, HiddenError> {
        if let Some(home) = self.home
            && let Ok((_, 0)) = tables.entry_at(mem, home, 2)
        {
            return Ok(home);
        }
        empty_entries(mem, tables, self.window, None, 1)
    }

    /// Returns the number of slots in use.
    pub(crate) fn slots_in_use(&self) -> u64 {
        self.first + self.last - self.free.len() as u64
    }

    /// Returns the addresses of the fixed pages while the region is mapped.
    #[must_use]
    pub fn fixtures(&self) -> Option<Fixtures> {
        Some(self.mapped.as_ref()?.fixtures)
    }

    /// Builds the interrupt descriptor table of the exception window from the guest's table `own`. The region
    /// must be mapped.
    ///
    /// # Errors
    /// When the region is not mapped, or its memory is missing.
    pub fn build_idt(&self, mem: &dyn PhysMemory, own: &[u8; IDT_SIZE]) -> Result<(), HiddenError> {
        let Some(mapped) = &self.mapped else {
            return Err(HiddenError::NotMapped);
        };
        let mut table = *own;
        for (gate, vector) in table.chunks_exact_mut(GATE_SIZE).zip(0..) {
            let [a, b, c, d, e, f, g, h] = mapped.fixtures.stub(vector).0.to_le_bytes();
            gate[0..2].copy_from_slice(&[a, b]);
            gate[6..12].copy_from_slice(&[c, d, e, f, g, h]);
        }
        let frame = self.at.wrapping_add(IDT_PAGE * PAGE);
        mem.write(frame, &table)?;
        self.enter(mem, IDT_PAGE)
    }

    /// Removes the region from the guest's address space. All slots must have been released.
    ///
    /// # Errors
    /// When the guest has changed the entry, which is then left as it is.
    pub fn unmap(&mut self, mem: &dyn PhysMemory) -> Result<(), HiddenError> {
        let Some(mapped) = self.mapped.take() else {
            return Ok(());
        };
        (self.first, self.last) = (0, 0);
        self.free.clear();
        let now = mem.read_u64(mapped.entry_at)?;
        // The processor may have set the dirty bit of our entry.
        if now & !entry::DIRTY != mapped.entry {
            return Err(HiddenError::EntryChanged {
                at: mapped.entry_at,
            });
        }
        mem.write(mapped.entry_at, &0_u64.to_le_bytes())?;
        Ok(())
    }

    /// Returns whether the region was mapped and its entry no longer holds our value.
    pub(crate) fn is_lost(&self, mem: &dyn PhysMemory) -> bool {
        self.mapped.as_ref().is_some_and(|mapped| {
            let now = mem.read_u64(mapped.entry_at);
            now.map(|now| now & !entry::DIRTY) != Ok(mapped.entry)
        })
    }

    /// Keeps the region mapped from now on: a task may reach the trampoline at any time.
    pub fn pin(&mut self) {
        self.pinned = true;
    }

    /// Returns whether the region may be unmapped: no slot is in use, and the trampoline never was.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !self.pinned && self.first + self.last == self.free.len() as u64
    }

    /// Takes a free slot for which `copy` succeeds, and returns the copy. Slots are taken from the beginning. From
    /// there, a copy does not reach addresses just above zero (RIP-relative per-CPU variables), so a copy that
    /// refers to them gets a slot at the end. The region must be mapped.
    ///
    /// # Errors
    /// When all slots, or all slots within reach, are in use, or when the region is not mapped.
    pub fn take<T>(
        &mut self,
        mem: &dyn PhysMemory,
        copy: impl Fn(Gva) -> Option<T>,
    ) -> Result<T, HiddenError> {
        let Some(mapped) = &self.mapped else {
            return Err(HiddenError::NotMapped);
        };
        let base = mapped.base;
        let copy = |index: u64| copy(base.wrapping_add(index * SLOT));
        let mut free = self.free.iter().enumerate().rev();
        if let Some((n, copied)) = free.find_map(|(n, index)| Some((n, copy(*index)?))) {
            self.free.remove(n);
            return Ok(copied);
        }
        if self.first + self.last == self.slots {
            return Err(match self.free.is_empty() {
                true => HiddenError::OutOfSlots(self.slots),
                false => HiddenError::NoneInReach,
            });
        }
        let (lowest, highest) = (self.first, self.slots - self.last - 1);
        if let Some(copied) = copy(lowest) {
            self.see_slot(mem, lowest)?;
            self.first += 1;
            Ok(copied)
        } else if let Some(copied) = copy(highest) {
            self.see_slot(mem, highest)?;
            self.last += 1;
            Ok(copied)
        } else {
            Err(HiddenError::NoneInReach)
        }
    }

    /// Returns the address of the last slot, while the region is mapped and has slots.
    #[must_use]
    pub fn last_slot(&self) -> Option<Gva> {
        let last = self.slots.checked_sub(1)?;
        Some(self.mapped.as_ref()?.base.wrapping_add(last * SLOT))
    }

    /// Makes the page of slot `index` visible to the guest. Does nothing if a slot of this page was handed out
    /// before: then the page is visible already.
    fn see_slot(&self, mem: &dyn PhysMemory, index: u64) -> Result<(), HiddenError> {
        let page = index / SLOTS_PER_PAGE;
        let mut slots = page * SLOTS_PER_PAGE..(page + 1) * SLOTS_PER_PAGE;
        if slots.any(|slot| self.was_handed_out(slot)) {
            return Ok(());
        }
        self.add_page(mem, SLOT_PAGES + page)
    }

    fn was_handed_out(&self, index: u64) -> bool {
        index < self.first || (self.slots - self.last..self.slots).contains(&index)
    }

    /// Makes page `n` of the region visible to the guest, full of int3s. An entry that was not present is in no
    /// TLB, so no flush is needed (SDM vol. 3, 4.10.2.3).
    fn add_page(&self, mem: &dyn PhysMemory, n: u64) -> Result<(), HiddenError> {
        let frame = self.at.wrapping_add(n * PAGE);
        mem.write(frame, &PAGE_OF_INT3)?;
        self.enter(mem, n)
    }

    /// Enters page `n` into the region's page table. No page is marked as no-execute: where the guest's
    /// EFER.NXE is clear that bit is reserved, and delivering an exception through such a page would fault (SDM
    /// vol. 3, 4.7).
    fn enter(&self, mem: &dyn PhysMemory, n: u64) -> Result<(), HiddenError> {
        let frame = self.at.wrapping_add(n * PAGE);
        let value = frame.0 | entry::PRESENT | entry::ACCESSED;
        mem.write(self.at.wrapping_add(n * 8), &value.to_le_bytes())?;
        Ok(())
    }

    /// Returns the number of slots that can be taken, and the number of all slots.
    pub(crate) fn room(&self) -> (u64, u64) {
        let left = self.slots - self.first - self.last + self.free.len() as u64;
        (left, self.slots)
    }

    /// Writes `code` into its slot; the rest of the slot stays int3.
    ///
    /// # Errors
    /// When the slot is not one of the region's.
    pub fn fill(&self, mem: &dyn PhysMemory, code: &SlotCode) -> Result<(), HiddenError> {
        let at = self.slot_gpa(code.at())?;
        mem.write(at, code.bytes())?;
        Ok(())
    }

    /// Releases `slot` and fills it with int3s.
    ///
    /// # Errors
    /// When the slot is not one of the region's.
    pub fn release(&mut self, mem: &dyn PhysMemory, slot: Gva) -> Result<(), HiddenError> {
        let at = self.slot_gpa(slot)?;
        mem.write(at, &[INT3; SLOT_SIZE])?;
        self.free
            .push((at.0 - self.at.0 - SLOT_PAGES * PAGE) / SLOT);
        Ok(())
    }

    fn slot_gpa(&self, slot: Gva) -> Result<Gpa, HiddenError> {
        self.mapped
            .as_ref()
            .and_then(|m| slot.offset_from(m.base))
            .filter(|offset| offset % SLOT == 0 && self.was_handed_out(offset / SLOT))
            .map(|offset| self.at.wrapping_add(SLOT_PAGES * PAGE + offset))
            .ok_or(HiddenError::NotMapped)
    }
}

#[cfg(test)]
mod tests;
