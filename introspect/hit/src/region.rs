//! The places in the hidden region that a hit uses: stubs, trampoline and interrupt descriptor table, the ring,
//! and the counters of detours. The engine maps the region and fills it.

use hvprobe_arch::detour::RECORD_CELLS;
use hvprobe_arch::insn::{ENDBR64, GateHead};
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::trap::{GATE_PORT, VECTORS};
use hvprobe_arch::{Gpa, Gva};

use crate::event::Headroom;

const PAGE: u64 = 4096;
/// Number of bytes that one page table maps.
pub const TABLE_SPAN: u64 = 2 << 20;
/// Page of the stubs and the trampoline, counted from the start of the region.
pub const CODE_PAGE: u64 = 1;
/// Page of the interrupt descriptor table, counted from the start of the region.
pub const IDT_PAGE: u64 = 2;
/// Size in bytes of one stub: `endbr64`, `out imm8, al` and two int3s.
pub const STUB: u64 = 8;
/// Offset of the trampoline in the code page: after the stubs.
pub const TRAMPOLINE: u64 = VECTORS * STUB + 64;
/// `out GATE_PORT, al`, with which stubs and trampoline exit to the host.
pub const OUT: [u8; 2] = GateHead::patch(GATE_PORT);

/// The range of kernel addresses below the kernel image: from `__START_KERNEL_map` to the lowest address at which
/// the image may lie, 16 MiB above. The kernel clears the page-table entries of this range at boot
/// (`cleanup_highmap` in arch/x86/mm/init_64.c) and never uses them again. In a kernel that was configured to lie
/// lower (`CONFIG_PHYSICAL_START`) nothing is probed.
pub const KERNEL_WINDOW: Window = Window {
    start: Gva(0xffff_ffff_8000_0000),
    end: Gva(0xffff_ffff_8100_0000),
};

/// A range of the guest's address space in which the region may be mapped; both ends are multiples of 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address.
    pub start: Gva,
    /// First address after the window.
    pub end: Gva,
}

impl Window {
    /// Returns whether `at` lies in the window.
    #[must_use]
    pub fn contains(&self, at: Gva) -> bool {
        (self.start..self.end).contains(&at)
    }
}

/// The fixed places of a mapped region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixtures {
    start: Gva,
}

impl Fixtures {
    /// Returns the fixed places of a region that is mapped at `start`.
    #[must_use]
    pub fn new(start: Gva) -> Self {
        Self { start }
    }

    /// Returns the address of the trampoline: the `out` that functions with a return probe return to.
    #[must_use]
    pub fn trampoline(&self) -> Gva {
        self.start.wrapping_add(CODE_PAGE * PAGE + TRAMPOLINE)
    }

    /// Returns whether RIP has reached the trampoline, whether or not it has passed the `out` (hosts differ).
    #[must_use]
    pub fn at_trampoline(&self, rip: Gva) -> bool {
        let offset = rip.offset_from(self.trampoline());
        offset.is_some_and(|offset| offset == 0 || offset == OUT.len() as u64)
    }

    /// Returns the address of the exception window's interrupt descriptor table.
    #[must_use]
    pub fn idt(&self) -> Gva {
        self.start.wrapping_add(IDT_PAGE * PAGE)
    }

    /// Returns the address of the stub that exception `vector` is sent to while the exception window is open.
    #[must_use]
    pub fn stub(&self, vector: u64) -> Gva {
        self.start.wrapping_add(CODE_PAGE * PAGE + vector * STUB)
    }

    /// Returns the vector whose stub RIP has reached, whether or not it has passed the `out` (hosts differ). RIP
    /// may also be at the `endbr64` before the `out`, where an NMI may interrupt the guest.
    #[must_use]
    pub fn vector(&self, rip: Gva) -> Option<u8> {
        const AT: u64 = ENDBR64.len() as u64;
        const BEHIND: u64 = AT + OUT.len() as u64;
        let offset = rip.offset_from(self.stub(0))?;
        matches!(offset % STUB, 0 | AT | BEHIND)
            .then(|| u8::try_from(offset / STUB).ok())
            .flatten()
    }

    /// Returns whether `at` lies in the region.
    #[must_use]
    pub fn contain(&self, at: Gva) -> bool {
        at.offset_from(self.start)
            .is_some_and(|offset| offset < TABLE_SPAN)
    }
}

/// Addresses of the ring in the guest's physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// The word of the head: the position at which detours reserve the next cells.
    pub head: Gpa,
    /// The word of the limit, which the head must not pass.
    pub limit: Gpa,
    /// The word of the bell: the doorbell rings when the head passes it.
    pub bell: Gpa,
    /// The first cell.
    pub cells: Gpa,
    /// Number of cells, without the spare cells.
    pub capacity: u32,
    /// Number of used cells at which the doorbell rings.
    pub watermark: u32,
}

impl RingPlace {
    /// Returns the limit and the bell of a ring that was never used.
    #[must_use]
    pub fn initial(&self) -> (u64, u64) {
        (self.capacity.into(), self.watermark.into())
    }

    /// Returns how much room detours find in the ring now.
    ///
    /// # Errors
    /// When there is no such memory.
    pub fn room(&self, mem: &dyn PhysMemory) -> Result<Headroom, OutOfRange> {
        let free = mem
            .read_u64(self.limit)?
            .wrapping_sub(mem.read_u64(self.head)?);
        let all = self.capacity.into();
        // Not more than the capacity, unless the guest has written the head: then nothing can be reserved.
        let free = if free <= all { free } else { 0 };
        Ok(Headroom::of(free, all, RECORD_CELLS.into()))
    }

    /// Sets the limit up to which detours may reserve cells, and the position at which they ring the doorbell.
    ///
    /// # Errors
    /// When there is no such memory.
    pub fn publish(&self, mem: &dyn PhysMemory, limit: u64, bell: u64) -> Result<(), OutOfRange> {
        mem.write_u64(self.limit, limit)?;
        mem.write_u64(self.bell, bell)
    }
}

/// Address of the counters (64 bits each) that the detour of one probe increments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterPlace(pub Gva);

impl CounterPlace {
    /// Returns the address of the counter of hits that found no room in the ring.
    #[must_use]
    pub fn lost(self) -> Gva {
        self.0
    }

    /// Returns the address of the counter of hits that a condition rejected.
    #[must_use]
    pub fn vetoed(self) -> Gva {
        self.0.wrapping_add(8)
    }

    /// Returns the address of the counter of calls for which there was no free instance.
    #[must_use]
    pub fn missed(self) -> Gva {
        self.0.wrapping_add(16)
    }

    /// Returns the address of the head of the free list of instances. This word follows the counters.
    #[must_use]
    pub fn free(self) -> Gva {
        self.0.wrapping_add(24)
    }
}
