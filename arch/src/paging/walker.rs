//! A cache of the page walks of one vCPU, which accesses the same few pages at each of its hits.
//!
//! A [`Walker`] remembers the results of walks in its own table, whose size is fixed. It takes no lock, and
//! allocates only in [`Walker::new`]. A remembered walk is used in two ways:
//!
//! - *Within one hit* ([`Walker::begin`]), without a check. A processor may use a cached translation in the same
//!   way, until it has to flush it (SDM vol. 3, 4.10.2 and 4.10.5). The kernel waits until every processor has
//!   flushed (`flush_tlb_kernel_range`), so it also waits for the processor that is stopped at a hit.
//! - *From hit to hit*, only after the entries of the walk were read again, from the top down, and are unchanged.
//!   Entries that a kernel never changes are not read again, nor are entries that were already read again in this
//!   hit. If an entry has changed, the tables are walked again.
//!
//! # Which entries are read again
//!
//! An entry has a meaning only while its table is part of the tree. A table that left the tree may keep its
//! content, or may be used for other data and happen to contain the same word. So for each entry that is read
//! again, the entry that leads to its table is read again, too, up to a table that never leaves the tree. Only
//! addresses of the kernel's half are remembered. They are translated by the kernel's own tables (`init_mm`'s),
//! whichever process runs, so neither a new CR3 nor PTI's second one matters. Linux changes entries as follows, by
//! their level:
//!
//! - *A page's own entry*, when the page is mapped or unmapped, or its permissions change.
//! - *The entry above it*, when a large page is split or put together again (`split_large_page`,
//!   `collapse_pmd_page` in arch/x86/mm/pat/set_memory.c), or replaces a table (`pmd_free_pte_page` in
//!   arch/x86/mm/pgtable.c). The table is freed without being cleared.
//! - *Level 3*, when a page of 1 GiB replaces a table (`pud_free_pmd_page`), when such a page is put together
//!   (`collapse_pud_page`), and when memory is unplugged (`free_pmd_table` in arch/x86/mm/init_64.c). Most pages of
//!   a hit are in the direct map and share this entry: one read of it is valid for the rest of the hit.
//! - *Level 3 in the last two gigabytes*, never, so these entries are not read again: the table that they are in,
//!   and the tables to which they lead, are part of the kernel's image (`level3_kernel_pgt`, `level2_kernel_pgt`
//!   and `level2_fixmap_pgt` in arch/x86/kernel/head_64.S).
//! - *Level 4, if there is a fifth*, when memory is unplugged (`free_pud_table`).
//! - *The root's entries*, never after they were made. When a process ends, only the tables of its own half are
//!   freed.
//!
//! In addition, the engine creates a new walker, without remembered walks, each time it stops the vCPUs. A guest
//! that changes its tables in other ways deceives only itself: [`PhysMemory`] checks every remembered address at
//! each access.

use std::cell::Cell;

use super::tables::{PAGE_SHIFT, PageTables, Step, WalkError};
use crate::mem::PhysMemory;
use crate::{Gpa, Gva};

const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
const WITHIN: u64 = PAGE_SIZE - 1;
const WORD: usize = size_of::<u64>();
/// Binary logarithm of the number of pages that are remembered.
const PAGES_LOG2: u32 = 6;
const PAGES: usize = 1 << PAGES_LOG2;
/// Start of the kernel's half of the addresses.
const KERNEL_HALF: u64 = 1 << 63;

/// Start of the addresses whose level-2 tables are part of the kernel's image.
const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// An entry of the guest's tables as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Read {
    at: Gpa,
    value: u64,
}

impl Read {
    #[inline]
    fn is_unchanged(self, mem: &(impl PhysMemory + ?Sized)) -> bool {
        mem.read_u64(self.at).is_ok_and(|value| value == self.value)
    }
}

/// The entries of levels 4 and 3 of a walk, except the page's own entry and entries that never change. They are in
/// separate cells, because usually only one of them is used.
#[derive(Debug, Default)]
struct Upper {
    fourth: Cell<Option<Read>>,
    third: Cell<Option<Read>>,
}

impl Upper {
    #[inline(always)]
    fn is_unchanged(&self, mem: &(impl PhysMemory + ?Sized)) -> bool {
        let is_unchanged = |read: Read| read.is_unchanged(mem);
        self.fourth.get().is_none_or(is_unchanged) && self.third.get().is_none_or(is_unchanged)
    }
}

/// Maximum number of different [`Upper`]s that are remembered: one for each bit of a `u64`.
const UPPERS: usize = u64::BITS as usize;
/// Index of the [`Upper`] that has no entries. That `Upper` never changes.
const NO_UPPER: u8 = 0;

/// A remembered page of 4 KiB, or 4 KiB of a larger page.
#[derive(Debug)]
#[repr(align(64))]
struct Place {
    /// Virtual address of the page; a value that is not page-aligned if no page is remembered here.
    start: Cell<u64>,
    frame: Cell<Gpa>,
    /// Number of the hit in which the entries of the walk were last read.
    hit: Cell<u64>,
    /// Number of the page's [`Upper`].
    upper: Cell<u8>,
    /// The entry of level 2, if it is not the page's own.
    second: Cell<Option<Read>>,
    /// The page's own entry.
    leaf: Cell<Read>,
}

impl Place {
    fn empty() -> Self {
        Self {
            start: Cell::new(WITHIN),
            frame: Cell::new(Gpa(0)),
            hit: Cell::new(0),
            upper: Cell::new(NO_UPPER),
            second: Cell::new(None),
            leaf: Cell::new(Read {
                at: Gpa(0),
                value: 0,
            }),
        }
    }

    /// Returns whether the entries of the walk below its [`Upper`] are unchanged.
    #[inline(always)]
    fn is_end_unchanged(&self, mem: &(impl PhysMemory + ?Sized)) -> bool {
        let second = self.second.get();
        second.is_none_or(|read| read.is_unchanged(mem)) && self.leaf.get().is_unchanged(mem)
    }
}

/// Page tables, and the remembered walks through them. Owned by one vCPU.
#[derive(Debug)]
pub struct Walker {
    tables: PageTables,
    /// Each page is at the place that its address hashes to.
    places: Box<[Place; PAGES]>,
    /// Number of the current hit.
    hit: Cell<u64>,
    /// The [`Upper`]s of remembered pages, by number. Only the first `len` are in use.
    uppers: Box<[Upper; UPPERS]>,
    /// Number of [`Upper`]s in use, including [`NO_UPPER`].
    len: Cell<u8>,
    /// The [`Upper`]s that were read again in this hit and are unchanged: a bit for each.
    unchanged: Cell<u64>,
}

impl Walker {
    /// Creates a walker for the kernel's own `tables`, without remembered walks. Allocates.
    #[must_use]
    pub fn new(tables: PageTables) -> Self {
        Self {
            tables,
            places: Box::new(std::array::from_fn(|_| Place::empty())),
            hit: Cell::new(1),
            uppers: Box::new(std::array::from_fn(|_| Upper::default())),
            len: Cell::new(NO_UPPER + 1),
            unchanged: Cell::new(1 << NO_UPPER),
        }
    }

    /// Returns the page tables.
    #[must_use]
    pub fn tables(&self) -> &PageTables {
        &self.tables
    }

    /// Begins another hit: from now on, a remembered walk is used only after its entries were read again.
    pub fn begin(&self) {
        self.hit.set(self.hit.get() + 1);
        self.unchanged.set(1 << NO_UPPER);
    }

    /// Reads the bytes at `at` into `into`, like [`PageTables::read`]. Hit path: if the bytes are in one page that
    /// is remembered, the first access to the page in a hit also reads an entry for each level, except for the root
    /// and for entries that were already read again for another page. Further accesses in the hit read no entry.
    ///
    /// # Errors
    /// As [`PageTables::read`].
    #[inline]
    pub fn read(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        into: &mut [u8],
    ) -> Result<(), WalkError> {
        if !is_in_one_page(at, into.len()) {
            return self.tables.read(mem, at, into);
        }
        mem.read(self.translate(mem, at)?, into)
            .map_err(|source| WalkError::Memory { at, source })
    }

    /// Writes `bytes` from `at` on, like [`PageTables::write`]. Hit path: as [`Walker::read`].
    ///
    /// # Errors
    /// As [`PageTables::write`].
    #[inline]
    pub fn write(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        bytes: &[u8],
    ) -> Result<(), WalkError> {
        if !is_in_one_page(at, bytes.len()) {
            return self.tables.write(mem, at, bytes);
        }
        mem.write(self.translate(mem, at)?, bytes)
            .map_err(|source| WalkError::Memory { at, source })
    }

    /// Reads the little-endian 64-bit word at `at`, like [`PageTables::read_u64`]. Hit path: as
    /// [`Walker::read`].
    ///
    /// # Errors
    /// As [`PageTables::read_u64`].
    #[inline(always)]
    pub fn read_u64(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Result<u64, WalkError> {
        let known = self.known(mem, at, WORD);
        match known.and_then(|gpa| mem.read_u64(gpa).ok()) {
            Some(word) => Ok(word),
            None => self.read_u64_anew(mem, at),
        }
    }

    #[inline(never)]
    fn read_u64_anew(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Result<u64, WalkError> {
        if !is_in_one_page(at, WORD) {
            return self.tables.read_u64(mem, at);
        }
        mem.read_u64(self.walk(mem, at)?)
            .map_err(|source| WalkError::Memory { at, source })
    }

    /// Reads the little-endian 64-bit words at `at` plus each of `offsets`. If all of them are in one remembered
    /// page, looks that page up only once. Hit path: as [`Walker::read`].
    ///
    /// # Errors
    /// As [`Walker::read`].
    #[inline]
    pub fn read_words<const N: usize>(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        offsets: [u64; N],
    ) -> Result<[u64; N], WalkError> {
        match self.words_near(mem, at, offsets) {
            Some(words) => Ok(words),
            None => self.read_words_apart(mem, at, offsets),
        }
    }

    /// Returns the words; `None` unless all of them are in the page of the first one, and that page is remembered.
    #[inline(always)]
    fn words_near<const N: usize>(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        offsets: [u64; N],
    ) -> Option<[u64; N]> {
        let first = *offsets.first()?;
        let gpa = self.known(mem, at.wrapping_add(first), WORD)?;
        let within = gpa.0 & WITHIN;
        let mut words = [0; N];
        for (word, offset) in words.iter_mut().zip(offsets) {
            // Modulo 2^64, so a word before this page is also refused as one beyond its end.
            let within = within.wrapping_add(offset.wrapping_sub(first));
            if within > PAGE_SIZE - WORD as u64 {
                return None;
            }
            *word = mem.read_u64(Gpa(gpa.0 & !WITHIN | within)).ok()?;
        }
        Some(words)
    }

    #[inline(never)]
    fn read_words_apart<const N: usize>(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        offsets: [u64; N],
    ) -> Result<[u64; N], WalkError> {
        let mut words = [0; N];
        for (word, offset) in words.iter_mut().zip(offsets) {
            *word = self.read_u64(mem, at.wrapping_add(offset))?;
        }
        Ok(words)
    }

    /// Writes the little-endian 64-bit word at `at`, like [`PageTables::write`]. Hit path: as [`Walker::read`].
    ///
    /// # Errors
    /// As [`PageTables::write`].
    #[inline]
    pub fn write_u64(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        value: u64,
    ) -> Result<(), WalkError> {
        if !is_in_one_page(at, WORD) {
            return self.tables.write(mem, at, &value.to_le_bytes());
        }
        mem.write_u64(self.translate(mem, at)?, value)
            .map_err(|source| WalkError::Memory { at, source })
    }

    /// Returns the physical address of the byte at `at`.
    #[inline]
    fn translate(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Result<Gpa, WalkError> {
        match self.known(mem, at, 1) {
            Some(gpa) => Ok(gpa),
            None => self.walk(mem, at),
        }
    }

    /// Returns the physical address of the `len` bytes at `at`, if they lie in one page and the walk there is
    /// remembered and still valid.
    #[inline(always)]
    fn known(&self, mem: &(impl PhysMemory + ?Sized), at: Gva, len: usize) -> Option<Gpa> {
        let start = at.0 & !WITHIN;
        let place = self.place(start);
        if place.start.get() != start || !is_in_one_page(at, len) {
            return None;
        }
        let hit = self.hit.get();
        if place.hit.get() != hit {
            // This is the first access to the page in this hit.
            if !self.is_unchanged(mem, place) {
                return None;
            }
            place.hit.set(hit);
        }
        Some(place.frame.get().wrapping_add(at.0 & WITHIN))
    }

    /// Returns whether the entries of the walk to `place` are unchanged. Reads each entry after those above it, as
    /// a processor does. Not inlined, so that later accesses in a hit take few instructions.
    #[inline(never)]
    fn is_unchanged(&self, mem: &(impl PhysMemory + ?Sized), place: &Place) -> bool {
        if self.unchanged.get() >> place.upper.get() & 1 == 0 {
            return self.is_all_unchanged(mem, place);
        }
        place.is_end_unchanged(mem)
    }

    /// Like [`Walker::is_unchanged`], but also reads the [`Upper`] again.
    #[inline(never)]
    fn is_all_unchanged(&self, mem: &(impl PhysMemory + ?Sized), place: &Place) -> bool {
        let upper = place.upper.get();
        if !self.uppers[usize::from(upper) % UPPERS].is_unchanged(mem) {
            return false;
        }
        self.unchanged.set(self.unchanged.get() | 1 << upper);
        place.is_end_unchanged(mem)
    }

    /// Returns the number of the [`Upper`] with these entries. Adds it if there is none.
    fn number(&self, fourth: Option<Read>, third: Option<Read>) -> u8 {
        let is_it = |upper: &Upper| (upper.fourth.get(), upper.third.get()) == (fourth, third);
        let mut known = self.uppers.iter().zip(0..self.len.get());
        if let Some((_, number)) = known.find(|(known, _)| is_it(known)) {
            return number;
        }
        if usize::from(self.len.get()) == UPPERS {
            // Rare, because it takes accesses to that many different gigabytes. Forgets all pages, so that the
            // numbers can be used again.
            for place in &*self.places {
                place.start.set(WITHIN);
            }
            self.len.set(NO_UPPER + 1);
            self.unchanged.set(1 << NO_UPPER);
        }
        let number = self.len.get();
        let upper = &self.uppers[usize::from(number) % UPPERS];
        upper.fourth.set(fourth);
        upper.third.set(third);
        self.len.set(number + 1);
        number
    }

    /// Walks to `at`, and remembers the walk if the address is in the kernel's half.
    #[cold]
    #[inline(never)]
    fn walk(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Result<Gpa, WalkError> {
        let top = self.tables.levels.top();
        let mut met = [None; 5];
        let leaf = self.tables.walk(mem, at, 1, |step| {
            if let Some(met) = met.get_mut(usize::from(step.level)) {
                *met = Some(Read::from(step));
            }
        })?;
        let gpa = leaf.page(at)?;
        if at.0 & KERNEL_HALF != 0 {
            let above = |level: u8| {
                let read = met.get(usize::from(level)).copied().flatten();
                read.filter(|_| level > leaf.level && level < top)
            };
            let start = at.0 & !WITHIN;
            let upper = match start {
                IMAGE.. => NO_UPPER,
                _ => self.number(above(4), above(3)),
            };
            let place = self.place(start);
            place.start.set(start);
            place.frame.set(Gpa(gpa.0 & !WITHIN));
            place.upper.set(upper);
            place.second.set(above(2));
            place.leaf.set(leaf.into());
            place.hit.set(self.hit.get());
        }
        Ok(gpa)
    }

    /// Returns the place of the page at `start`.
    #[inline]
    fn place(&self, start: u64) -> &Place {
        // Fibonacci hashing (Knuth, vol. 3, 6.4): spreads neighbouring pages, and pages at the same offset in
        // different areas of the kernel's addresses.
        let hash = (start >> PAGE_SHIFT).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let index = usize::try_from(hash >> (u64::BITS - PAGES_LOG2)).unwrap_or(0);
        &self.places[index % PAGES]
    }
}

impl From<Step> for Read {
    fn from(step: Step) -> Self {
        Self {
            at: step.location,
            value: step.value,
        }
    }
}

/// Returns whether the `len` bytes at `at` lie in one page of 4 KiB. `false` if `len` is zero.
#[inline]
fn is_in_one_page(at: Gva, len: usize) -> bool {
    let room = PAGE_SIZE - (at.0 & WITHIN);
    len != 0 && len as u64 <= room
}

#[cfg(test)]
mod tests;
