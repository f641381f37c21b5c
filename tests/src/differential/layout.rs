//! Layout of the bench guest's memory, and its page tables.
//!
//! ```text
//!  physical                 virtual
//!  0x0001000  system pages  0xffffc90000000000 + physical: GDT, TSS, IDT, stubs, exception stack
//!  0x0008000  slots         0xffffffff80400000, one page, and nothing else near it
//!  0x0009000  landing page  0xffffffff80800000, likewise
//!  0x0010000  arena, 32 KiB 0xffff888001000000 and 0x400000, with nothing mapped around;
//!                           and repeated wherever the kernel's upper 2 GiB have no text
//!  0x0020000  page tables
//!  0x1000000  kernel text   where it is linked
//! ```
//! So any RIP-relative or absolute operand lies in the arena, and no page table ever changes. A second root makes
//! those operands fault: it maps only text, slots and landing page in the upper 2 GiB, and is otherwise the same.

use hvprobe_arch::Gpa;
use hvprobe_arch::Gva;
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::paging::{Levels, PageTables, entry};
use hvprobe_vm::memory::GuestRam;

pub(super) const PAGE: u64 = 0x1000;

/// Offset from physical to virtual addresses of the first 64 KiB.
pub(super) const SYSTEM: u64 = 0xffff_c900_0000_0000;
pub(super) const GDT: Gpa = Gpa(0x1000);
pub(super) const TSS: Gpa = Gpa(0x1100);
pub(super) const IDT: Gpa = Gpa(0x2000);
pub(super) const STUBS: Gpa = Gpa(0x3000);
/// Top of the stack on which exceptions are handled.
pub(super) const EXCEPTION_STACK: Gpa = Gpa(0x6000);

const SLOT_FRAME: u64 = 0x8000;
const LANDING_FRAME: u64 = 0x9000;
/// Virtual address of the page for out-of-line slots.
pub(super) const SLOTS: u64 = MAP + (4 << 20);
/// Virtual address of the page for targets of branches.
pub(super) const LANDING: u64 = MAP + (8 << 20);

pub(super) const ARENA_FRAMES: Gpa = Gpa(0x1_0000);
pub(super) const ARENA_SIZE: u64 = 0x8000;
/// Virtual address of the arena.
pub(super) const ARENA: u64 = 0xffff_8880_0100_0000;
/// Second mapping of the arena, for 32-bit addresses.
pub(super) const LOW_ARENA: u64 = 0x40_0000;

const TABLES: u64 = 0x2_0000;

/// `__START_KERNEL_map`: virtual address of physical address 0 in the mapping of the kernel's text.
pub(super) const MAP: u64 = 0xffff_ffff_8000_0000;

const TABLE: u64 = entry::PRESENT | entry::WRITABLE | entry::ACCESSED;
const LEAF: u64 = TABLE | entry::DIRTY;
const MIB2: u64 = 2 << 20;

/// The two address spaces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spaces {
    /// Everything is mapped.
    pub(super) full: PageTables,
    /// Everything is mapped except data in the upper 2 GiB.
    pub(super) bare: PageTables,
}

/// Allocates pages for tables, and writes the tables.
struct Builder<'a> {
    ram: &'a GuestRam,
    next: u64,
}

impl Builder<'_> {
    /// Writes a table with `entries`; all other entries are empty. Returns its physical address.
    fn table(&mut self, entries: impl IntoIterator<Item = (u64, u64)>) -> Result<u64, OutOfRange> {
        let table = self.next;
        self.next += PAGE;
        self.ram.write(Gpa(table), &[0; 0x1000])?;
        for (index, entry) in entries {
            self.ram
                .write(Gpa(table + index % 512 * 8), &entry.to_le_bytes())?;
        }
        Ok(table)
    }

    /// Writes tables of levels 3 to 1 that map `leaves` from `at` on, all in one 2 MiB piece. Returns the physical
    /// address of the level-3 table.
    fn chain(&mut self, at: u64, leaves: impl Iterator<Item = u64>) -> Result<u64, OutOfRange> {
        let leaves: Vec<_> = (at >> 12..).zip(leaves).collect();
        let level1 = self.table(leaves)?;
        let level2 = self.table([(at >> 21, level1 | TABLE)])?;
        self.table([(at >> 30, level2 | TABLE)])
    }

    /// Writes the tables of levels 3 to 1 for the upper 2 GiB. For pages without text, `data` gets an index in a
    /// level-1 table and returns the entry. Returns the physical address of the level-3 table.
    fn upper(&mut self, text: (u64, u64), data: impl Fn(u64) -> u64) -> Result<u64, OutOfRange> {
        let data_only = self.table((0..512).map(|n| (n, data(n))))?;
        let mut halves = Vec::new();
        for gib in [MAP, MAP + (1 << 30)] {
            let mut pieces = Vec::new();
            for piece in (0..512).map(|n| gib + n * MIB2) {
                let has_text = piece.saturating_add(MIB2) > text.0 && piece < text.1;
                let frame = match piece {
                    SLOTS => Some(SLOT_FRAME),
                    LANDING => Some(LANDING_FRAME),
                    _ => None,
                };
                let table = if let Some(frame) = frame {
                    self.table([(0, frame | LEAF)])?
                } else if has_text {
                    self.table((0..512).map(|n| {
                        let page = piece + n * PAGE;
                        let is_text = page + PAGE > text.0 && page < text.1;
                        (
                            n,
                            if is_text {
                                (page - MAP) | LEAF
                            } else {
                                data(n)
                            },
                        )
                    }))?
                } else {
                    data_only
                };
                pieces.push((piece >> 21, table | TABLE));
            }
            halves.push((gib >> 30, self.table(pieces)? | TABLE));
        }
        self.table(halves)
    }
}

/// Writes the page tables for a kernel whose text is at `text`.
pub(super) fn write_page_tables(ram: &GuestRam, text: (u64, u64)) -> Result<Spaces, OutOfRange> {
    let mut builder = Builder { ram, next: TABLES };
    let arena = |n: u64| (ARENA_FRAMES.0 + n * PAGE % ARENA_SIZE) | LEAF;
    let frames = || (0..ARENA_SIZE / PAGE).map(arena);
    let low = builder.chain(LOW_ARENA, frames())?;
    let direct = builder.chain(ARENA, frames())?;
    let system = builder.chain(SYSTEM, (0..16).map(|n| (n * PAGE) | LEAF))?;
    let root = |builder: &mut Builder<'_>, upper: u64| {
        let root = builder.table([
            (LOW_ARENA >> 39, low | TABLE),
            (ARENA >> 39, direct | TABLE),
            (SYSTEM >> 39, system | TABLE),
            (MAP >> 39, upper | TABLE),
        ])?;
        Ok(PageTables {
            root: Gpa(root),
            levels: Levels::Four,
        })
    };
    let full = builder.upper(text, arena)?;
    let bare = builder.upper(text, |_| 0)?;
    Ok(Spaces {
        full: root(&mut builder, full)?,
        bare: root(&mut builder, bare)?,
    })
}

/// Returns the virtual address of the system page or stack at `at`.
pub(super) fn system(at: Gpa) -> Gva {
    Gva(SYSTEM + at.0)
}
