//! Contents of memory and registers that a processor needs to start in 64-bit mode.
//!
//! The state is the one Linux asks for at its 64-bit entry point (`Documentation/arch/x86/boot.rst`,
//! "64-bit boot protocol"): long mode, paging on over an identity map, a flat code segment with
//! selector `0x10` and a flat data segment with selector `0x18`, interrupts off.
//!
//! ```text
//! GDT (little-endian words)     identity tables at BASE, one page each
//!   0x00  null                    BASE + 0x0000  PML4   [0]    -> PDPT
//!   0x08  null                    BASE + 0x1000  PDPT   [0..4] -> PD 0 .. PD 3
//!   0x10  code, 64-bit            BASE + 0x2000  PD 0   512 leaves of 2 MiB, from 0 GiB
//!   0x18  data, flat              BASE + 0x3000  PD 1   from 1 GiB
//!   0x20  TSS, low word           BASE + 0x4000  PD 2   from 2 GiB
//!   0x28  TSS, high word          BASE + 0x5000  PD 3   from 3 GiB
//! ```

use crate::Gpa;
use crate::paging::entry;

/// Bits of CR0 (SDM vol. 3, 2.5).
pub mod cr0 {
    /// Protected mode.
    pub const PE: u64 = 1 << 0;
    /// `wait` also traps while TS is set.
    pub const MP: u64 = 1 << 1;
    /// x87 instructions trap.
    pub const EM: u64 = 1 << 2;
    /// Task switched: x87 and SSE instructions trap until the bit is cleared.
    pub const TS: u64 = 1 << 3;
    /// x87 present; always one.
    pub const ET: u64 = 1 << 4;
    /// x87 errors raise #MF.
    pub const NE: u64 = 1 << 5;
    /// Write protection of pages also applies to the kernel.
    pub const WP: u64 = 1 << 16;
    /// Alignment checks allowed.
    pub const AM: u64 = 1 << 18;
    /// Paging.
    pub const PG: u64 = 1 << 31;
}

/// Bits of CR4 (SDM vol. 3, 2.5).
pub mod cr4 {
    /// 64-bit page table entries; required for long mode.
    pub const PAE: u64 = 1 << 5;
    /// Global pages.
    pub const PGE: u64 = 1 << 7;
    /// The operating system saves SSE state with `fxsave`.
    pub const OSFXSR: u64 = 1 << 9;
    /// The operating system handles #XM.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// Five-level paging.
    pub const LA57: u64 = 1 << 12;
    /// The operating system saves extended state with `xsave`.
    pub const OSXSAVE: u64 = 1 << 18;
}

/// Bits of the MSR IA32_EFER (SDM vol. 3, 2.2.1).
pub mod efer {
    /// `syscall` and `sysret` enabled.
    pub const SCE: u64 = 1 << 0;
    /// Long mode enabled.
    pub const LME: u64 = 1 << 8;
    /// Long mode active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute bit of page tables enabled.
    pub const NX: u64 = 1 << 11;
}

/// A segment, with the fields of its descriptor (SDM vol. 3, 3.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Value of the segment register.
    pub selector: u16,
    /// Linear address of its first byte.
    pub base: u32,
    /// Offset of its last byte, in bytes.
    pub limit: u32,
    /// The four type bits.
    pub kind: u8,
    /// S: code or data rather than a system segment.
    pub code_or_data: bool,
    /// L: 64-bit code.
    pub long: bool,
    /// D/B: 32-bit operands by default.
    pub big: bool,
    /// G: the descriptor counts the limit in pages.
    pub granular: bool,
}

/// Flat 64-bit code: execute, read, accessed.
pub const CODE: Segment = Segment {
    selector: 0x10,
    base: 0,
    limit: 0xffff_ffff,
    kind: 0xb,
    code_or_data: true,
    long: true,
    big: false,
    granular: true,
};

/// Flat data: read, write, accessed.
pub const DATA: Segment = Segment {
    selector: 0x18,
    base: 0,
    limit: 0xffff_ffff,
    kind: 0x3,
    code_or_data: true,
    long: false,
    big: true,
    granular: true,
};

/// A busy 64-bit task state segment. TR must hold one when a virtual machine is entered (SDM vol. 3, "Checks on
/// Guest Segment Registers").
pub const TSS: Segment = Segment {
    selector: 0x20,
    base: 0,
    limit: 0xffff,
    kind: 0xb,
    code_or_data: false,
    long: false,
    big: false,
    granular: false,
};

impl Segment {
    /// Returns the segment's descriptor, marked as present and for privilege level 0. For a system segment, returns
    /// the descriptor's low word.
    #[must_use]
    pub const fn descriptor(&self) -> u64 {
        let limit = if self.granular {
            self.limit >> 12
        } else {
            self.limit
        } as u64;
        let base = self.base as u64;
        (limit & 0xffff)
            | (base & 0xff_ffff) << 16
            | ((self.kind & 0xf) as u64) << 40
            | (self.code_or_data as u64) << 44
            | 1 << 47
            | (limit >> 16 & 0xf) << 48
            | (self.long as u64) << 53
            | (self.big as u64) << 54
            | (self.granular as u64) << 55
            | (base >> 24) << 56
    }
}

/// The descriptor table: two null entries, [`CODE`], [`DATA`] and [`TSS`], each at its selector.
pub const GDT: [u64; 6] = [
    0,
    0,
    CODE.descriptor(),
    DATA.descriptor(),
    TSS.descriptor(),
    0,
];

const PAGE: u64 = 4096;
const LARGE_PAGE: u64 = 2 << 20;
const ENTRIES: u64 = 512;

/// Number of GiB that [`identity_tables`] maps.
const GIBIBYTES: u64 = 4;

/// Size in bytes of [`identity_tables`].
pub const IDENTITY_TABLES_SIZE: u64 = (2 + GIBIBYTES) * PAGE;

/// Builds page tables that map the first 4 GiB to themselves, writable and executable, in 2 MiB pages. The tables
/// must be placed at `base`, which must be page-aligned; CR3 is then `base`.
#[must_use]
pub fn identity_tables(base: Gpa) -> Vec<u8> {
    debug_assert!(
        base.0.is_multiple_of(PAGE),
        "page tables at an unaligned {base}"
    );
    const TABLE: u64 = entry::PRESENT | entry::WRITABLE;
    const LEAF: u64 = TABLE | entry::HUGE;

    // Returns the entries of a table. The first `count` entries lead to tables in successive pages, beginning with
    // page `first`.
    let leading = |count: u64, first: u64| {
        (0..ENTRIES).map(move |index| match index < count {
            true => base.wrapping_add((first + index) * PAGE).0 | TABLE,
            false => 0,
        })
    };
    let (top, pointers) = (leading(1, 1), leading(GIBIBYTES, 2));
    let leaves = (0..GIBIBYTES * ENTRIES).map(|index| (index * LARGE_PAGE) | LEAF);
    top.chain(pointers)
        .chain(leaves)
        .flat_map(u64::to_le_bytes)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::flat::FlatMemory;
    use crate::paging::{Levels, Mapping, PageTables};
    use crate::{Gva, mem::PhysMemory};

    #[test]
    fn descriptors_are_the_ones_the_boot_protocol_gives() {
        assert_eq!(
            GDT,
            [
                0,
                0,
                0x00af_9b00_0000_ffff,
                0x00cf_9300_0000_ffff,
                0x0000_8b00_0000_ffff,
                0
            ]
        );
        for segment in [CODE, DATA, TSS] {
            assert_eq!(
                GDT[usize::from(segment.selector) / 8],
                segment.descriptor(),
                "{segment:?}"
            );
        }
    }

    #[test]
    fn descriptor_spreads_base_and_limit() {
        let segment = Segment {
            base: 0x1234_5678,
            limit: 0xa_bcde,
            granular: false,
            ..TSS
        };
        assert_eq!(segment.descriptor(), 0x120a_8b34_5678_bcde);
    }

    #[test]
    fn identity_tables_map_four_gibibytes_to_themselves_and_no_more() {
        let base = Gpa(0x9000);
        let tables = identity_tables(base);
        assert_eq!(u64::try_from(tables.len()).unwrap(), IDENTITY_TABLES_SIZE);
        let mem = FlatMemory::new(0x10000);
        mem.write(base, &tables).unwrap();
        let walk = PageTables {
            root: base,
            levels: Levels::Four,
        };
        for at in [0, 0x1234, 0x1f_ffff, 0x20_0000, 0xfee0_0030, 0xffff_ffff] {
            assert_eq!(
                walk.translate(&mem, Gva(at)),
                Ok(Mapping {
                    gpa: Gpa(at),
                    page_size: 2 << 20,
                    writable: true,
                    user: false,
                    executable: true
                })
            );
        }
        assert!(walk.translate(&mem, Gva(1 << 32)).is_err());
        assert!(walk.translate(&mem, Gva(1 << 39)).is_err());
    }
}
