//! The part of the hidden region for detours: their code, and the memory that they share with the host.
//!
//! | pages | what                                                   | the guest may    |
//! |-------|--------------------------------------------------------|------------------|
//! | 0, 1  | code of detours, int3s elsewhere                       | read and execute |
//! | 2 … 5 | the ring's control words, counters of each probe, the  | read and write   |
//! |       | ring's cells, instances of calls                       |                  |
//!
//! Pages are of 2 MiB. All are mapped when the first detour is made. The guest may write anything into the shared
//! pages, so the host checks what it reads there.

use hvprobe_arch::detour::{CELL, MAX_RECORD_CELLS, Ring, STUB};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::trap::{DOORBELL_PORT, INT3};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_hit::region::{CounterPlace, RingPlace, Window};

use super::extent::{Access, Extent, LARGE_PAGE};
use super::space::Space;
use crate::code::error::HiddenError;

const CODE_PAGES: u64 = 2;
const DATA_PAGES: u64 = 4;
/// Size of the guest physical memory for detours, in bytes.
pub(crate) const SIZE: u64 = (CODE_PAGES + DATA_PAGES) * LARGE_PAGE;
/// Offsets in the shared pages: `HEAD`, `LIMIT` and `BELL` of the ring's control words, `COUNTERS` of the counters,
/// and `CELLS` of the ring's cells.
const HEAD: u64 = 0;
const LIMIT: u64 = 64;
const BELL: u64 = LIMIT + 8;
const COUNTERS: u64 = 4096;
const CELLS: u64 = 1 << 20;
/// Number of cells of the ring. The fastest stream of records fills them in some milliseconds.
const CAPACITY: u32 = 1 << 16;
/// A record may begin in the last cell and extend past it.
const CELLS_END: u64 = CELLS + (CAPACITY as u64 + MAX_RECORD_CELLS as u64) * CELL as u64;
const _: () = assert!(CELLS_END <= DATA_PAGES * LARGE_PAGE);
/// Offset of the instances of return probes, after the cells.
const INSTANCES: u64 = CELLS_END.next_multiple_of(4096);
/// Number of cells in use at which the guest notifies the host.
const WATERMARK: u32 = CAPACITY / 4;
/// Size of one probe's counters, in bytes.
const COUNTER: u64 = 32;
/// Unit of allocation for detours, in bytes.
const UNIT: u64 = 16;

/// The memory for detours of one machine.
#[derive(Debug)]
pub(crate) struct Detours {
    code: Extent,
    data: Extent,
    place: RingPlace,
    window: Window,
    /// Address at which the region's other pages may be mapped. Detours must not be there.
    taken: Option<Gva>,
    /// Number of times that instances were allocated.
    handed_out: u64,
    /// Free parts of the code, the counters and the instances. Empty until addresses are reserved.
    free_code: Space,
    free_counters: Space,
    free_instances: Space,
}

impl Detours {
    pub(crate) fn new(at: Gpa, window: Window) -> Self {
        let data = at.wrapping_add(CODE_PAGES * LARGE_PAGE);
        Self {
            code: Extent::new(at, CODE_PAGES, Access::Execute),
            data: Extent::new(data, DATA_PAGES, Access::Write),
            place: RingPlace {
                head: data.wrapping_add(HEAD),
                limit: data.wrapping_add(LIMIT),
                bell: data.wrapping_add(BELL),
                cells: data.wrapping_add(CELLS),
                capacity: CAPACITY,
                watermark: WATERMARK,
            },
            window,
            taken: None,
            handed_out: 0,
            free_code: Space::default(),
            free_counters: Space::default(),
            free_instances: Space::default(),
        }
    }

    pub(crate) fn place(&self) -> RingPlace {
        self.place
    }

    /// Keeps detours away from `place`, where the region's other pages may be mapped.
    pub(crate) fn leave(&mut self, place: Gva) {
        self.taken = Some(place);
    }

    /// Reserves addresses for all pages, if they have none yet. The guest cannot see the pages until
    /// [`Detours::enter`].
    ///
    /// # Errors
    /// When the window has no room, or the page tables cannot be walked.
    pub(crate) fn reserve(
        &mut self,
        mem: &dyn PhysMemory,
        tables: &PageTables,
    ) -> Result<Ring, HiddenError> {
        let fresh = self.code.start().is_none() || self.data.start().is_none();
        let data = self.data.reserve(mem, tables, self.window, self.taken, 0)?;
        // The page-table entries reserved for the data are still empty. A smaller window keeps the code off them.
        let behind = Window {
            start: data.wrapping_add(self.data.len()),
            ..self.window
        };
        let code = self.code.reserve(mem, tables, behind, self.taken, INT3)?;
        if fresh {
            let (limit, bell) = self.place.initial();
            self.place.publish(mem, limit, bell)?;
            self.free_code = Space::new(code, self.code.len());
            let counters = data.wrapping_add(COUNTERS);
            self.free_counters = Space::new(counters, CELLS - COUNTERS);
            let instances = data.wrapping_add(INSTANCES);
            self.free_instances = Space::new(instances, self.data.len() - INSTANCES);
        }
        Ok(Ring {
            head: data.wrapping_add(HEAD),
            limit: data.wrapping_add(LIMIT),
            bell: data.wrapping_add(BELL),
            cells: data.wrapping_add(CELLS),
            capacity: CAPACITY,
            watermark: WATERMARK,
            doorbell_port: DOORBELL_PORT,
        })
    }

    /// Maps all pages that have addresses into the guest. The virtual CPUs must be stopped.
    ///
    /// # Errors
    /// When one of the page-table entries has been taken meanwhile.
    pub(crate) fn enter(
        &mut self,
        mem: &dyn PhysMemory,
        tables: &PageTables,
    ) -> Result<(), HiddenError> {
        self.data.enter(mem, tables)?;
        self.code.enter(mem, tables)
    }

    /// Takes `size` bytes of code. `choose` gets the first and the last possible address in a free part, and
    /// returns the address to use.
    pub(crate) fn take(
        &mut self,
        size: u64,
        choose: impl Fn(Gva, Gva) -> Option<Gva>,
    ) -> Option<Gva> {
        self.free_code.take(size.next_multiple_of(UNIT), choose)
    }

    /// Writes a detour, which no task can reach yet.
    ///
    /// # Errors
    /// When the address is not in the code pages.
    pub(crate) fn fill(
        &self,
        mem: &dyn PhysMemory,
        at: Gva,
        code: &[u8],
    ) -> Result<(), HiddenError> {
        let gpa = self.code.gpa(at, code.len() as u64);
        mem.write(gpa.ok_or(HiddenError::NotMapped)?, code)?;
        Ok(())
    }

    /// Returns the initial use count of the next instances. Each allocation begins 2^24 higher than the one before
    /// it, and no instance has 2^24 calls. So the ids of calls differ from those of all earlier instances at the
    /// same addresses.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.handed_out = self.handed_out.wrapping_add(1);
        self.handed_out << 24
    }

    /// Returns the number of the stub at `at`, unique as long as the stub exists.
    pub(crate) fn stub_number(&self, at: Gva) -> Option<u32> {
        let offset = at.offset_from(self.code.start()?)?;
        u32::try_from(offset / u64::from(STUB)).ok()
    }

    /// Releases the memory of a detour and fills it with int3s.
    pub(crate) fn release(&mut self, mem: &dyn PhysMemory, at: Gva, size: u64) {
        let size = size.next_multiple_of(UNIT);
        if let Some(gpa) = self.code.gpa(at, size) {
            for offset in (0..size).step_by(16) {
                // The write cannot fail: the memory existed when the detour was written.
                let _ = mem.write(gpa.wrapping_add(offset), &[INT3; 16]);
            }
            self.free_code.release(at, size);
        }
    }

    /// Takes room for the counters of one probe, and sets them to zero.
    pub(crate) fn take_counters(&mut self, mem: &dyn PhysMemory) -> Option<CounterPlace> {
        let at = self
            .free_counters
            .take(COUNTER, |first, _| Some(first))
            .map(CounterPlace)?;
        for counter in [at.lost(), at.vetoed(), at.missed(), at.free()] {
            mem.write(self.data.gpa(counter, 8)?, &[0; 8]).ok()?;
        }
        Some(at)
    }

    pub(crate) fn release_counters(&mut self, at: CounterPlace) {
        self.free_counters.release(at.0, COUNTER);
    }

    /// Returns the number of bytes in use for code, for counters and for instances.
    pub(crate) fn in_use(&self) -> [u64; 3] {
        let data = self.data.len();
        let all = [
            (&self.free_code, self.code.len()),
            (&self.free_counters, CELLS - COUNTERS),
            (&self.free_instances, data - INSTANCES),
        ];
        // Before addresses are reserved, nothing is free and nothing is in use.
        let is_there = self.code.start().is_some() && self.data.start().is_some();
        all.map(|(space, len)| if is_there { len - space.free() } else { 0 })
    }

    /// Returns the physical address of the word at `at`; `None` if it is not in the shared pages.
    pub(crate) fn word(&self, at: Gva) -> Option<Gpa> {
        self.data.gpa(at, 8)
    }

    /// Takes memory for instances at a multiple of `align`, a power of two, and writes `bytes` to it.
    pub(crate) fn take_instances(
        &mut self,
        mem: &dyn PhysMemory,
        bytes: &[u8],
        align: u64,
    ) -> Option<(Gva, Gpa)> {
        let len = bytes.len() as u64;
        let at = self.free_instances.take(len, aligned(align))?;
        let gpa = self.data.gpa(at, len)?;
        mem.write(gpa, bytes).ok()?;
        Some((at, gpa))
    }

    pub(crate) fn release_instances(&mut self, at: Gva, len: u64) {
        self.free_instances.release(at, len);
    }
}

/// Returns a function that finds the first multiple of `align` in a free piece.
pub(crate) fn aligned(align: u64) -> impl Fn(Gva, Gva) -> Option<Gva> {
    move |first, last| {
        let at = Gva(first.0.checked_next_multiple_of(align)?);
        (at <= last).then_some(at)
    }
}
