//! Walks that one virtual CPU makes again and again: at each of its hits, to the same few pages.
//!
//! A [`Walker`] remembers where a walk led, in a table of fixed size of its own: no lock, and no
//! allocation once it is made. What it remembers is used in two ways:
//!
//! - *Within one hit* ([`Walker::begin`]) as it is. A processor too may use what it knows of a page
//!   until it is told to flush it (SDM vol. 3, 4.10.2 and 4.10.5), and the kernel, which waits for
//!   every processor to do so (`flush_tlb_kernel_range`), waits for the one that is stopped at a hit.
//! - *From hit to hit* only after the two lowest entries of the walk, the page's own and the one
//!   that leads to its table, were read again and found unchanged. Otherwise the walk is made anew.
//!
//! # Why two entries are enough
//!
//! What a plain walk would find differs from what is remembered only if an entry above the two has
//! changed while the table it led to, which then is no longer part of the tree, still has its old
//! content. Only addresses of the kernel's half are remembered, in the kernel's own tables
//! (`init_mm`'s) whichever process runs, so neither a new CR3 nor PTI's second one matters. What
//! Linux does there, by level of the entry that changes:
//!
//! - *A page's own entry*: mapping, unmapping, permissions. Read again.
//! - *The entry above it*, when a large page is split or put together again (`split_large_page`,
//!   `collapse_pmd_page` in arch/x86/mm/pat/set_memory.c), or is mapped where a table was
//!   (`pmd_free_pte_page` in arch/x86/mm/pgtable.c). The table is freed with its content, but the
//!   entry that led to it is read again too: this is why there are two.
//! - *Two above, for a page of 4 KiB* (level 3): `pud_free_pmd_page` clears each entry of the table
//!   it frees, and memory that is unplugged frees only tables that are empty (`free_pmd_table` in
//!   arch/x86/mm/init_64.c). `collapse_pud_page` does leave content behind, but its gigabytes are
//!   those of the direct map, where an address has only ever one translation.
//! - *Further up* entries are made and never changed, but by the unplugging of memory, which clears
//!   from below. A process that ends takes only the tables of its own half with it.
//!
//! A new walker at each stop of the virtual CPUs, as the engine makes one, forgets even so all that
//! was before. A guest that does otherwise deceives itself alone: whatever is remembered is an
//! address that [`PhysMemory`] checks at each access.

use std::cell::Cell;

use super::{PAGE_SHIFT, PageTables, Step, WalkError};
use crate::mem::PhysMemory;
use crate::{Gpa, Gva};

const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
const WITHIN: u64 = PAGE_SIZE - 1;
const WORD: usize = size_of::<u64>();
/// Binary logarithm of how many pages are remembered.
const PAGES_LOG2: u32 = 6;
const PAGES: usize = 1 << PAGES_LOG2;
/// Where the kernel's half of the addresses begins.
const KERNEL_HALF: u64 = 1 << 63;

/// An entry of the guest's tables as it was read.
#[derive(Clone, Copy, Debug)]
struct Read {
    at: Gpa,
    value: u64,
}

impl Read {
    #[inline]
    fn is_unchanged(self, mem: &(impl PhysMemory + ?Sized)) -> bool {
        mem.read_u64(self.at) == Ok(self.value)
    }
}

/// A page of 4 KiB, or such a part of a larger one, and the end of the walk to it.
#[derive(Clone, Copy, Debug)]
struct Page {
    /// The virtual address; no address of a page before one is remembered.
    start: u64,
    frame: Gpa,
    /// The entry above the leaf, and the leaf.
    above: Read,
    leaf: Read,
}

impl Page {
    const NONE: Self = {
        let read = Read {
            at: Gpa(0),
            value: 0,
        };
        Self {
            start: WITHIN,
            frame: Gpa(0),
            above: read,
            leaf: read,
        }
    };
}

/// Room for a page.
#[derive(Debug)]
#[repr(align(64))]
struct Place {
    page: Cell<Page>,
    /// The hit in which the entries of the page were last read.
    hit: Cell<u64>,
}

impl Place {
    fn empty() -> Self {
        Self {
            page: Cell::new(Page::NONE),
            hit: Cell::new(0),
        }
    }
}

/// Page tables and what is remembered of walks through them. One virtual CPU's own.
#[derive(Debug)]
pub struct Walker {
    tables: PageTables,
    /// Each at the place that its address hashes to.
    places: Box<[Place; PAGES]>,
    hit: Cell<u64>,
}

impl Walker {
    /// A walker through the kernel's own `tables` that remembers nothing yet. Allocates.
    #[must_use]
    pub fn new(tables: PageTables) -> Self {
        Self {
            tables,
            places: Box::new(std::array::from_fn(|_| Place::empty())),
            hit: Cell::new(1),
        }
    }

    /// Another hit: from now on nothing is used without a look at the tables.
    pub fn begin(&self) {
        self.hit.set(self.hit.get() + 1);
    }

    /// Fills `into` from `at` on, as [`PageTables::read`]. Hit path: for what lies in one page that
    /// is remembered, two reads besides its own, or none the second time in a hit.
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

    /// Writes `bytes` from `at` on, as [`PageTables::write`]. Hit path: as [`Walker::read`].
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

    /// The little-endian 64-bit word at `at`, as [`PageTables::read_u64`]. Hit path: as
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

    /// The two little-endian 64-bit words at `at`. Hit path: as [`Walker::read`].
    ///
    /// # Errors
    /// As [`Walker::read`].
    #[inline]
    pub fn read_words(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
    ) -> Result<[u64; 2], WalkError> {
        let known = self.known(mem, at, 2 * WORD);
        let words = known.and_then(|gpa| {
            let behind = gpa.wrapping_add(WORD as u64);
            Some([mem.read_u64(gpa).ok()?, mem.read_u64(behind).ok()?])
        });
        match words {
            Some(words) => Ok(words),
            None => self.read_words_anew(mem, at),
        }
    }

    #[inline(never)]
    fn read_words_anew(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
    ) -> Result<[u64; 2], WalkError> {
        let behind = at.wrapping_add(WORD as u64);
        Ok([self.read_u64(mem, at)?, self.read_u64(mem, behind)?])
    }

    /// Writes the little-endian 64-bit word at `at`, as [`PageTables::write`]. Hit path: as
    /// [`Walker::read`].
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

    /// The physical address of the byte at `at`.
    #[inline]
    fn translate(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Result<Gpa, WalkError> {
        match self.known(mem, at, 1) {
            Some(gpa) => Ok(gpa),
            None => self.walk(mem, at),
        }
    }

    /// The physical address of the `len` bytes at `at`, if they lie in one page and the walk there is
    /// remembered and still good.
    #[inline(always)]
    fn known(&self, mem: &(impl PhysMemory + ?Sized), at: Gva, len: usize) -> Option<Gpa> {
        let start = at.0 & !WITHIN;
        let place = self.place(start);
        let page = place.page.get();
        if page.start != start || !is_in_one_page(at, len) {
            return None;
        }
        let hit = self.hit.get();
        if place.hit.get() != hit {
            // The first byte of its page in this hit.
            if !page.above.is_unchanged(mem) || !page.leaf.is_unchanged(mem) {
                return None;
            }
            place.hit.set(hit);
        }
        Some(page.frame.wrapping_add(at.0 & WITHIN))
    }

    /// Walks to `at`, and remembers how if it is the kernel's.
    #[cold]
    #[inline(never)]
    fn walk(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Result<Gpa, WalkError> {
        let mut above = None;
        let mut last = None;
        let leaf = self.tables.walk(mem, at, 1, |step| {
            above = last.replace(step);
        })?;
        let gpa = leaf.page(at)?;
        if at.0 & KERNEL_HALF != 0
            && let Some(above) = above
        {
            let start = at.0 & !WITHIN;
            let place = self.place(start);
            place.page.set(Page {
                start,
                frame: Gpa(gpa.0 & !WITHIN),
                above: above.into(),
                leaf: leaf.into(),
            });
            place.hit.set(self.hit.get());
        }
        Ok(gpa)
    }

    /// Where the page at `start` is remembered.
    #[inline]
    fn place(&self, start: u64) -> &Place {
        // Fibonacci hashing (Knuth, vol. 3, 6.4): neighbours and pages of the same offset in
        // different areas of the kernel's addresses come apart.
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

/// Whether `len` bytes at `at`, which are some, lie in one page of 4 KiB.
#[inline]
fn is_in_one_page(at: Gva, len: usize) -> bool {
    let room = PAGE_SIZE - (at.0 & WITHIN);
    len != 0 && len as u64 <= room
}

#[cfg(test)]
mod tests;
