//! Page tables and walks through them.

use super::entry;
use crate::mem::{OutOfRange, PhysMemory};
use crate::{Gpa, Gva};

pub(super) const PAGE_SHIFT: u32 = 12;
const INDEX_BITS: u32 = 9;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
const ENTRY_SIZE: u64 = 8;

/// Number of levels of tables (CR4.LA57).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Levels {
    /// 48-bit addresses.
    Four,
    /// 57-bit addresses.
    Five,
}

impl Levels {
    /// Returns the level of the root table.
    pub(super) const fn top(self) -> u8 {
        match self {
            Self::Four => 4,
            Self::Five => 5,
        }
    }

    /// Returns whether all bits above the translated ones are copies of the highest translated one.
    const fn is_canonical(self, at: Gva) -> bool {
        let highest = shift(self.top() + 1) - 1;
        let above = at.0 >> highest;
        above == 0 || above == u64::MAX >> highest
    }
}

/// Returns the number of address bits that an entry of `level` leaves untranslated.
const fn shift(level: u8) -> u32 {
    PAGE_SHIFT + INDEX_BITS * (level as u32 - 1)
}

/// A set of page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTables {
    /// Physical address of the root table, or the value of CR3: bits that are not part of the address are ignored.
    pub root: Gpa,
    /// Number of levels.
    pub levels: Levels,
}

/// Translation of a virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Physical address that the virtual address translates to.
    pub gpa: Gpa,
    /// Size in bytes of the page that contains the address: 4 KiB, 2 MiB or 1 GiB.
    pub page_size: u64,
    /// Every level allows writing.
    pub writable: bool,
    /// Every level allows user mode.
    pub user: bool,
    /// No level forbids fetching instructions.
    pub executable: bool,
}

/// Why a virtual address does not translate, or cannot be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    /// The upper bits of the address are not copies of the highest translated one.
    #[error("{at} is not a canonical address")]
    NonCanonical {
        /// The address.
        at: Gva,
    },
    /// The walk met an entry without the present bit.
    #[error("{at} is not mapped: its level {level} entry is not present")]
    NotPresent {
        /// The address.
        at: Gva,
        /// The level of the entry: 1 for a PTE, up to 5.
        level: u8,
    },
    /// The process may not write there, for example because the page is to be copied on write.
    #[error("{at} may not be written by the process: its page is read-only, or the kernel's")]
    ReadOnly {
        /// The address.
        at: Gva,
    },
    /// [`PageTables::entry_at`] was asked for a level that the address does not have: above the
    /// root, zero, or below a large page.
    #[error("{at} has no level {level} entry")]
    NoSuchLevel {
        /// The address.
        at: Gva,
        /// The level asked for.
        level: u8,
    },
    /// The access ends past the last address.
    #[error("{len} bytes at {at} pass the end of the address space")]
    Wraps {
        /// Start of the access.
        at: Gva,
        /// Length of the access in bytes.
        len: usize,
    },
    /// A table, or the page itself, lies outside guest memory.
    #[error("{at} leads outside guest memory")]
    Memory {
        /// The virtual address.
        at: Gva,
        /// The physical access that failed.
        #[source]
        source: OutOfRange,
    },
}

/// One entry met on a walk.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub(super) level: u8,
    pub(super) location: Gpa,
    pub(super) value: u64,
}

impl Step {
    fn is_present(self) -> bool {
        self.value & entry::PRESENT != 0
    }

    /// Returns whether the entry maps a page rather than pointing to the next table.
    fn is_leaf(self) -> bool {
        match self.level {
            1 => true,
            2 | 3 => self.value & entry::HUGE != 0,
            _ => false,
        }
    }

    /// Returns the translation of `at`, if this is the last step of the walk to it.
    pub(super) fn page(self, at: Gva) -> Result<Gpa, WalkError> {
        let level = self.level;
        if !self.is_present() {
            return Err(WalkError::NotPresent { at, level });
        }
        let within = (1 << shift(level)) - 1;
        // In a large page's entry the bits between the flags and the page's own alignment are not
        // address bits (one is PAT).
        Ok(Gpa(
            (self.value & entry::ADDRESS & !within) | (at.0 & within)
        ))
    }
}

impl PageTables {
    /// Translates `at`: one 8-byte read per level, no allocation.
    ///
    /// # Errors
    /// When the address is not canonical or not mapped, or a table lies outside guest memory. The
    /// page itself may lie outside guest memory (a device's registers do).
    pub fn translate(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
    ) -> Result<Mapping, WalkError> {
        self.translate_to(mem, at).map(|(mapping, _)| mapping)
    }

    /// Like [`PageTables::translate`], but also returns the page's own entry.
    fn translate_to(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
    ) -> Result<(Mapping, Step), WalkError> {
        let mut mapping = Mapping {
            gpa: Gpa(0),
            page_size: 0,
            writable: true,
            user: true,
            executable: true,
        };
        let leaf = self.walk(mem, at, 1, |step| {
            mapping.writable &= step.value & entry::WRITABLE != 0;
            mapping.user &= step.value & entry::USER != 0;
            mapping.executable &= step.value & entry::NO_EXECUTE == 0;
        })?;
        mapping.gpa = leaf.page(at)?;
        mapping.page_size = 1 << shift(leaf.level);
        Ok((mapping, leaf))
    }

    /// Reads the bytes at `at` into `into`; they may lie in several pages.
    ///
    /// # Errors
    /// As [`PageTables::translate`], and when a page lies outside guest memory. After an error, the content of
    /// `into` is unspecified.
    pub fn read(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        into: &mut [u8],
    ) -> Result<(), WalkError> {
        check_extent(at, into.len())?;
        let mut at = at;
        let mut rest = into;
        while !rest.is_empty() {
            let mapping = self.translate(mem, at)?;
            let (here, further) = rest.split_at_mut(bytes_in_page(&mapping, rest.len()));
            mem.read(mapping.gpa, here)
                .map_err(|source| WalkError::Memory { at, source })?;
            at = at.wrapping_add(u64::try_from(here.len()).unwrap_or(u64::MAX));
            rest = further;
        }
        Ok(())
    }

    /// Writes `bytes` at `at`; they may lie in several pages. Ignores the write bit, because the host also changes
    /// read-only text.
    ///
    /// # Errors
    /// As [`PageTables::read`]. Every page is translated and checked to be in memory before the first byte is
    /// written. So after an error nothing has changed, unless the guest changed its tables meanwhile.
    pub fn write(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        bytes: &[u8],
    ) -> Result<(), WalkError> {
        check_extent(at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.write_pages(mem, at, bytes, &|at| self.translate(mem, at))
    }

    /// Writes `bytes` at `at`, but only to pages that the process itself may write. Marks the pages as written, as
    /// a processor does; otherwise, the kernel may discard them without saving the bytes.
    ///
    /// # Errors
    /// As [`PageTables::write`], and when the process may not write there.
    pub fn write_as_process(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        bytes: &[u8],
    ) -> Result<(), WalkError> {
        check_extent(at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.write_pages(mem, at, bytes, &|at| self.mark_written(mem, at))
    }

    /// Translates `at`, if the process may write there, and marks its page as written.
    fn mark_written(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
    ) -> Result<Mapping, WalkError> {
        const WRITTEN: u64 = entry::ACCESSED | entry::DIRTY;
        /// Maximum number of tries. If the guest changes the entry during each try, the result is
        /// [`WalkError::ReadOnly`].
        const TRIES: u8 = 8;
        for _ in 0..TRIES {
            let (mapping, leaf) = self.translate_to(mem, at)?;
            if !(mapping.writable && mapping.user) {
                break;
            }
            let marked = leaf.value | WRITTEN;
            let is_marked = leaf.value == marked
                || mem
                    .exchange_u64(leaf.location, leaf.value, marked)
                    .map_err(|source| WalkError::Memory { at, source })?;
            if is_marked {
                return Ok(mapping);
            }
        }
        Err(WalkError::ReadOnly { at })
    }

    /// Writes `bytes`, which must not be empty, from the last page to the first. All pages are translated before
    /// anything is written, because the write may change the tables that lead to the other pages.
    fn write_pages(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        bytes: &[u8],
        translate: &impl Fn(Gva) -> Result<Mapping, WalkError>,
    ) -> Result<(), WalkError> {
        let mapping = translate(at)?;
        let failed = |source| WalkError::Memory { at, source };
        let (here, rest) = bytes.split_at(bytes_in_page(&mapping, bytes.len()));
        if !rest.is_empty() {
            let offset = |offset: usize| u64::try_from(offset).unwrap_or(u64::MAX);
            for offset in [0, offset(here.len() - 1)] {
                let byte = mapping.gpa.wrapping_add(offset);
                mem.read(byte, &mut [0]).map_err(failed)?;
            }
            let next = at.wrapping_add(offset(here.len()));
            self.write_pages(mem, next, rest, translate)?;
        }
        // `mem` writes all of the bytes or none.
        mem.write(mapping.gpa, here).map_err(failed)
    }

    /// Reads the little-endian 64-bit word at `at`, which need not be aligned.
    ///
    /// # Errors
    /// As [`PageTables::read`].
    pub fn read_u64(&self, mem: &(impl PhysMemory + ?Sized), at: Gva) -> Result<u64, WalkError> {
        let mut word = [0; 8];
        self.read(mem, at, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Returns the location and the value of the entry of `level` that translates `at`, present or not. Level 1
    /// is the PTE, 2 the PMD, 3 the PUD, and so on up to the root.
    ///
    /// # Errors
    /// As [`PageTables::translate`] for the levels above, and when the address has no entry of this level.
    pub fn entry_at(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        level: u8,
    ) -> Result<(Gpa, u64), WalkError> {
        if level == 0 || level > self.levels.top() {
            return Err(WalkError::NoSuchLevel { at, level });
        }
        let step = self.walk(mem, at, level, |_| ())?;
        if step.level == level {
            Ok((step.location, step.value))
        } else if step.is_present() {
            Err(WalkError::NoSuchLevel { at, level })
        } else {
            Err(WalkError::NotPresent {
                at,
                level: step.level,
            })
        }
    }

    /// Follows the tables down to the entry of level `until`, and returns that entry. Stops earlier at the entry of
    /// a large page, or at an entry that is not present, and returns that entry. Calls `visit` for every present
    /// entry.
    pub(super) fn walk(
        &self,
        mem: &(impl PhysMemory + ?Sized),
        at: Gva,
        until: u8,
        mut visit: impl FnMut(Step),
    ) -> Result<Step, WalkError> {
        if !self.levels.is_canonical(at) {
            return Err(WalkError::NonCanonical { at });
        }
        let mut table = self.root.0 & entry::ADDRESS;
        let mut level = self.levels.top();
        loop {
            let index = (at.0 >> shift(level)) & INDEX_MASK;
            let location = Gpa(table + index * ENTRY_SIZE);
            let value = mem
                .read_u64(location)
                .map_err(|source| WalkError::Memory { at, source })?;
            let step = Step {
                level,
                location,
                value,
            };
            if step.is_present() {
                visit(step);
            }
            if level <= until || !step.is_present() || step.is_leaf() {
                return Ok(step);
            }
            table = value & entry::ADDRESS;
            level -= 1;
        }
    }
}

/// Returns how many of the `wanted` bytes at the mapping's address lie in the mapping's page. Zero only if `wanted`
/// is zero.
fn bytes_in_page(mapping: &Mapping, wanted: usize) -> usize {
    let left = mapping.page_size - (mapping.gpa.0 & (mapping.page_size - 1));
    usize::try_from(left).map_or(wanted, |left| left.min(wanted))
}

fn check_extent(at: Gva, len: usize) -> Result<(), WalkError> {
    let last = u64::try_from(len)
        .ok()
        .and_then(|len| at.checked_add(len.saturating_sub(1)));
    match last {
        Some(_) => Ok(()),
        None => Err(WalkError::Wraps { at, len }),
    }
}

#[cfg(test)]
mod tests;
