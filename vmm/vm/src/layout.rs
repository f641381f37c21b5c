//! Where guest memory below 1 MiB has what a kernel is entered with; everything else is the kernel's.
//!
//! | from | what |
//! |---|---|
//! | 0x1000 | GDT |
//! | 0x7000 | boot parameters |
//! | 0x8ff0 | top of the entry stack |
//! | 0x9000 | page tables that map the first 4 GiB onto themselves, six pages |
//! | 0x20000 | command line |
//! | 0xe0000 | ACPI tables |
//! | 0xffff0 | what kernels jump to, in real mode, to reset a machine they know no better way for |

use std::ops::Range;

use hvprobe_arch::Gpa;

pub(crate) const GDT: Gpa = Gpa(0x1000);
pub(crate) const BOOT_PARAMS: Gpa = Gpa(0x7000);
pub(crate) const STACK: Gpa = Gpa(0x8ff0);
pub(crate) const PAGE_TABLES: Gpa = Gpa(0x9000);
pub(crate) const CMDLINE: Gpa = Gpa(0x2_0000);
/// Where conventional memory ends and what firmware keeps begins.
pub(crate) const FIRMWARE: Gpa = Gpa(0x9_fc00);
/// Where ACPI tables lie, up to the reset vector: kernels look for the RSDP from here on.
pub(crate) const ACPI: Gpa = Gpa(0xe_0000);
/// Where execution of a PC's firmware begins, by its address below 1 MiB.
pub(crate) const RESET_VECTOR: Gpa = Gpa(0xf_fff0);
pub(crate) const HIGH: Gpa = Gpa(0x10_0000);

/// The place for the ACPI tables.
pub const ACPI_TABLES: Range<Gpa> = ACPI..RESET_VECTOR;
