//! Kernel entry: the entry point, the GDT and the page tables.

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::{OutOfRange, PhysMemory};

use crate::layout;

/// Selectors of the entry GDT, as the boot protocol requires them.
pub(crate) const CODE: u16 = 0x10;
pub(crate) const DATA: u16 = 0x18;

/// State that a vCPU needs to start the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Address of the first instruction.
    pub rip: Gpa,
    /// Address of the boot parameters; the kernel expects it in RSI.
    pub boot_params: Gpa,
    /// The address after the kernel's last byte, zeroed data included.
    pub kernel_end: Gpa,
    /// Address of the initramfs and its size in bytes, if there is one.
    pub initrd: Option<(Gpa, u64)>,
}

/// Descriptors 0 to 3: two unused ones, then [`CODE`] and [`DATA`].
const GDT: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
pub(crate) const GDT_BYTES: u16 = 4 * 8;

/// Bits of page table entries (SDM vol. 3, 4.5).
pub(crate) mod pte {
    pub(crate) const PRESENT: u64 = 1 << 0;
    pub(crate) const WRITABLE: u64 = 1 << 1;
    pub(crate) const USER: u64 = 1 << 2;
    pub(crate) const LARGE: u64 = 1 << 7;
}

/// Writes the GDT and the entry page tables, which map the first 4 GiB onto themselves.
///
/// # Errors
/// When guest memory has no RAM from 4 KiB to 64 KiB, where they lie.
pub(crate) fn write_tables(ram: &impl PhysMemory) -> Result<(), OutOfRange> {
    ram.write(layout::GDT, GDT.map(u64::to_le_bytes).as_flattened())?;
    write_page_tables(ram, 0)
}

/// Writes six pages at [`layout::PAGE_TABLES`]: one PML4, one PDPT, four page directories of 2 MiB pages. In every
/// entry, the bits of `flags` and the bits for present and writable are set.
pub(crate) fn write_page_tables(ram: &impl PhysMemory, flags: u64) -> Result<(), OutOfRange> {
    const PAGE: u64 = 4096;
    let flags = flags | pte::PRESENT | pte::WRITABLE;
    let pml4 = layout::PAGE_TABLES;
    let pdpt = pml4.wrapping_add(PAGE);
    let directories = pdpt.wrapping_add(PAGE);
    ram.write(pml4, &(pdpt.0 | flags).to_le_bytes())?;
    for gib in 0..4 {
        let directory = directories.wrapping_add(gib * PAGE);
        ram.write(
            pdpt.wrapping_add(gib * 8),
            &(directory.0 | flags).to_le_bytes(),
        )?;
        let pages: Vec<u8> = (0..512)
            .flat_map(|page| ((gib << 30 | page << 21) | flags | pte::LARGE).to_le_bytes())
            .collect();
        ram.write(directory, &pages)?;
    }
    Ok(())
}
