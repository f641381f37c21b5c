//! Layout of guest memory below 1 MiB at kernel entry. Everything not listed here belongs to the kernel.
//!
//! | from | what |
//! |---|---|
//! | 0x1000 | GDT |
//! | 0x7000 | boot parameters |
//! | 0x8ff0 | top of the entry stack |
//! | 0x9000 | page tables that map the first 4 GiB onto themselves, six pages |
//! | 0x20000 | command line |
//! | 0xe0000 | ACPI tables |
//! | 0xffff0 | reset vector: kernels jump here in real mode to reset a machine when they know no better way |

use std::ops::Range;

use hvprobe_arch::Gpa;

pub(crate) const GDT: Gpa = Gpa(0x1000);
pub(crate) const BOOT_PARAMS: Gpa = Gpa(0x7000);
pub(crate) const STACK: Gpa = Gpa(0x8ff0);
pub(crate) const PAGE_TABLES: Gpa = Gpa(0x9000);
pub(crate) const CMDLINE: Gpa = Gpa(0x2_0000);
/// End of conventional memory; the range that firmware reserves begins here.
pub(crate) const FIRMWARE: Gpa = Gpa(0x9_fc00);
/// Start of the range for ACPI tables, which ends at the reset vector. Kernels search for the RSDP from here on.
pub(crate) const ACPI: Gpa = Gpa(0xe_0000);
/// Reset vector: where a PC's firmware code starts, as an address below 1 MiB.
pub(crate) const RESET_VECTOR: Gpa = Gpa(0xf_fff0);
pub(crate) const HIGH: Gpa = Gpa(0x10_0000);

/// Range reserved for the ACPI tables.
pub const ACPI_TABLES: Range<Gpa> = ACPI..RESET_VECTOR;
