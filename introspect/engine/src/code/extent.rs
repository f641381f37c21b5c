//! Our large pages in the guest's address space: the code of detours, and the memory that detours share with the
//! host.
//!
//! States: `nowhere → reserved → mapped`. The guest sees an extent only when it is mapped. Invariants: an extent is
//! mapped while the virtual CPUs are stopped, through consecutive empty entries of the kernel's own level-2 table;
//! no extent is both writable and executable, as far as the guest's processors support that; a mapped extent stays,
//! because a task may have been interrupted in any detour.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{PageTables, entry};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_hit::region::Window;

use crate::code::error::HiddenError;

/// Size of a large page, in bytes.
pub(crate) const LARGE_PAGE: u64 = 2 << 20;
const ENTRIES: u64 = 512;

/// Access of the guest to an extent, in addition to reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Execute.
    Execute,
    /// Write.
    Write,
}

/// Consecutive large pages.
#[derive(Debug)]
pub(crate) struct Extent {
    at: Gpa,
    pages: u64,
    access: Access,
    reservation: Option<Reservation>,
}

/// Address of an extent in the guest.
#[derive(Clone, Copy, Debug)]
struct Reservation {
    start: Gva,
    /// Flags in the page-table entries of its pages.
    bits: u64,
    /// Whether the extent is mapped into the guest.
    entered: bool,
}

impl Extent {
    /// Creates an extent over `pages` large pages of guest physical memory at `at`, a multiple of their size.
    pub(crate) fn new(at: Gpa, pages: u64, access: Access) -> Self {
        Self {
            at,
            pages,
            access,
            reservation: None,
        }
    }

    /// Returns the size in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.pages * LARGE_PAGE
    }

    /// Returns the reserved address, at which the guest sees the extent once it is mapped.
    pub(crate) fn start(&self) -> Option<Gva> {
        Some(self.reservation?.start)
    }

    /// Returns the physical address of the `len` bytes at `at`; `None` unless all of them are in the extent.
    pub(crate) fn gpa(&self, at: Gva, len: u64) -> Option<Gpa> {
        let offset = at.offset_from(self.start()?)?;
        let inside = offset.checked_add(len)? <= self.len();
        inside.then(|| self.at.wrapping_add(offset))
    }

    /// If the extent has no addresses, reserves some in `window`, but not at `taken`, and fills the pages with
    /// `filling`. Returns the first address. The guest cannot see the pages yet.
    ///
    /// # Errors
    /// When there are not enough consecutive empty entries, or the page tables cannot be walked.
    pub(crate) fn reserve(
        &mut self,
        mem: &dyn PhysMemory,
        tables: &PageTables,
        window: Window,
        taken: Option<Gva>,
        filling: u8,
    ) -> Result<Gva, HiddenError> {
        if let Some(Reservation { start, .. }) = self.reservation {
            return Ok(start);
        }
        let start = empty_entries(mem, tables, window, taken, self.pages)?;
        let chunk = [filling; 4096];
        for offset in (0..self.len()).step_by(chunk.len()) {
            mem.write(self.at.wrapping_add(offset), &chunk)?;
        }
        let mut bits = entry::PRESENT | entry::ACCESSED | entry::HUGE;
        if self.access == Access::Write {
            bits |= entry::WRITABLE | entry::DIRTY | no_execute(mem, tables, start)?;
        }
        self.reservation = Some(Reservation {
            start,
            bits,
            entered: false,
        });
        Ok(start)
    }

    /// Maps the extent into the guest if it has addresses and is not mapped. The virtual CPUs must be stopped.
    ///
    /// # Errors
    /// When an entry has been taken meanwhile; then nothing is mapped.
    pub(crate) fn enter(
        &mut self,
        mem: &dyn PhysMemory,
        tables: &PageTables,
    ) -> Result<(), HiddenError> {
        let Some(reservation) = self.reservation.as_mut().filter(|it| !it.entered) else {
            return Ok(());
        };
        let mut entries = Vec::new();
        for page in 0..self.pages {
            let offset = page * LARGE_PAGE;
            let (at, value) = tables.entry_at(mem, reservation.start.wrapping_add(offset), 2)?;
            if value != 0 {
                return Err(HiddenError::EntryChanged { at });
            }
            entries.push((at, self.at.wrapping_add(offset)));
        }
        for (at, frame) in entries {
            mem.write(at, &(frame.0 | reservation.bits).to_le_bytes())?;
        }
        reservation.entered = true;
        Ok(())
    }
}

/// Returns the lowest address in `window` at which `count` consecutive entries of the level-2 table are empty. The
/// entry of `taken` does not count as empty.
///
/// # Errors
/// When there are none, or the page tables cannot be walked.
pub(super) fn empty_entries(
    mem: &dyn PhysMemory,
    tables: &PageTables,
    window: Window,
    taken: Option<Gva>,
    count: u64,
) -> Result<Gva, HiddenError> {
    let (mut first, mut run) = (window.start, 0);
    let mut at = window.start;
    while at < window.end {
        let (_, value) = tables.entry_at(mem, at, 2)?;
        if value == 0 && taken != Some(at) {
            run += 1;
            if run == count {
                return Ok(first);
            }
        } else {
            (first, run) = (at.wrapping_add(LARGE_PAGE), 0);
        }
        at = at.wrapping_add(LARGE_PAGE);
    }
    Err(HiddenError::WindowFull(window))
}

/// Returns the no-execute bit if the guest uses it anywhere in the level-2 table that maps `near`, otherwise 0.
/// Where EFER.NXE is clear, this bit is reserved (SDM vol. 3, 4.5.4). Where EFER.NXE is set, the kernel sets this
/// bit for its own data.
fn no_execute(mem: &dyn PhysMemory, tables: &PageTables, near: Gva) -> Result<u64, HiddenError> {
    let (entry_at, _) = tables.entry_at(mem, near, 2)?;
    let table = Gpa(entry_at.0 & !(ENTRIES * 8 - 1));
    for index in 0..ENTRIES {
        let value = mem.read_u64(table.wrapping_add(index * 8))?;
        if value & entry::PRESENT != 0 && value & entry::NO_EXECUTE != 0 {
            return Ok(entry::NO_EXECUTE);
        }
    }
    Ok(0)
}
