//! Puts kernel, initramfs, command line and boot parameters into guest memory.
//!
//! Postconditions: no two of these overlap, all lie in RAM, and the memory map in the boot parameters shows exactly
//! the machine's RAM, without the hidden region.

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_devices::{RESET_PORT, RESET_VALUE};
use hvprobe_vmlinux::{Kernel, KernelError, Segment, SetupHeader};

use super::error::LoadError;
use crate::entry::{self, Entry};
use crate::layout;
use crate::memory::{GuestRam, HOLE_END};

/// Maximum length of the kernel command line, in bytes (`COMMAND_LINE_SIZE` without the terminating zero).
pub const MAX_CMDLINE: usize = 2047;

const PAGE: u64 = 4096;

/// Offsets of fields in the boot parameters (Linux, Documentation/arch/x86/zero-page.rst and boot.rst).
mod field {
    pub(super) const ACPI_RSDP_ADDR: usize = 0x070;
    pub(super) const E820_ENTRIES: usize = 0x1e8;
    pub(super) const BOOT_FLAG: usize = 0x1fe;
    pub(super) const HEADER: usize = 0x202;
    pub(super) const VERSION: usize = 0x206;
    pub(super) const TYPE_OF_LOADER: usize = 0x210;
    pub(super) const LOADFLAGS: usize = 0x211;
    pub(super) const RAMDISK_IMAGE: usize = 0x218;
    pub(super) const RAMDISK_SIZE: usize = 0x21c;
    pub(super) const CMD_LINE_PTR: usize = 0x228;
    pub(super) const E820_TABLE: usize = 0x2d0;
}

/// `loadflags`: the kernel lies at 1 MiB or above.
const LOADED_HIGH: u8 = 1;
/// `loadflags`: the kernel was placed at random, so it also chooses the addresses of its memory regions at random.
const KASLR: u8 = 1 << 1;

/// Code at the reset vector. Linux jumps there on hardware-reduced ACPI platforms without EFI, unless its
/// command line names another way to reset.
const RESET: [u8; 7] = [
    0xb0,
    RESET_VALUE, // mov al, RESET_VALUE
    0xe6,
    RESET_PORT.to_le_bytes()[0], // out RESET_PORT, al
    0xf4,                        // hlt
    0xeb,
    0xfd, // jmp to the hlt
];

/// Types of range in the memory map (ACPI, "System Address Map Interfaces").
#[derive(Clone, Copy)]
enum Kind {
    Ram = 1,
    Reserved = 2,
    Acpi = 3,
}

/// Loads the kernel and all that it needs into `ram`. Before the call, `ram` must be zero except for the ACPI
/// tables.
///
/// `initrd` are archives, which the kernel unpacks one after the other. `rsdp` is the address of the RSDP, the
/// start of the ACPI tables.
///
/// # Errors
/// When kernel or initramfs do not fit the memory, the command line is too long or contains a zero byte, or the
/// image contradicts itself.
pub fn load(
    kernel: &Kernel,
    ram: &GuestRam,
    initrd: &[&[u8]],
    cmdline: &str,
    rsdp: Gpa,
) -> Result<Entry, LoadError> {
    let setup = kernel.setup();
    let mut params = Params::new();
    match setup {
        Some(setup) => params.set(SetupHeader::START, setup.bytes()),
        None => {
            params.set(field::BOOT_FLAG, &0xaa55u16.to_le_bytes());
            params.set(field::HEADER, b"HdrS");
            params.set(field::VERSION, &0x020cu16.to_le_bytes());
        }
    }
    // This loader has no assigned number.
    params.set(field::TYPE_OF_LOADER, &[0xff]);
    params.0[field::LOADFLAGS] |= LOADED_HIGH;
    params.0[field::LOADFLAGS] &= !KASLR;
    if kernel.slide().is_some() {
        params.0[field::LOADFLAGS] |= KASLR;
    }
    params.set(field::ACPI_RSDP_ADDR, &rsdp.0.to_le_bytes());

    let max = setup.map_or(MAX_CMDLINE, |setup| setup.cmdline_max().min(MAX_CMDLINE));
    put_cmdline(ram, cmdline, max)?;
    params.set_address(field::CMD_LINE_PTR, layout::CMDLINE)?;

    let kernel_end = put_kernel(kernel, ram)?;

    let initrd_max = setup.map_or(u64::MAX, |setup| setup.initrd_max().saturating_add(1));
    let top = ram.low_end().0.min(initrd_max);
    let initrd = put_initrd(ram, initrd, kernel_end, top)?;
    if let Some((start, size)) = initrd {
        params.set_address(field::RAMDISK_IMAGE, start)?;
        params.set_address(field::RAMDISK_SIZE, Gpa(size))?;
    }

    params.set_memory_map(ram);
    ram.write(layout::BOOT_PARAMS, &params.0).map_err(missing)?;
    ram.write(layout::RESET_VECTOR, &RESET).map_err(missing)?;
    entry::write_tables(ram).map_err(missing)?;
    Ok(Entry {
        rip: kernel.entry()?,
        boot_params: layout::BOOT_PARAMS,
        kernel_end,
        initrd,
    })
}

fn missing(error: OutOfRange) -> LoadError {
    LoadError::NoMemory(error.at)
}

fn put_cmdline(ram: &GuestRam, cmdline: &str, max: usize) -> Result<(), LoadError> {
    let len = cmdline.len();
    if len > max {
        return Err(LoadError::CmdlineTooLong { len, max });
    }
    if cmdline.contains('\0') {
        return Err(LoadError::CmdlineZero);
    }
    // The memory is zero, so the line is terminated.
    ram.write(layout::CMDLINE, cmdline.as_bytes())
        .map_err(missing)
}

/// Copies the kernel's segments, and returns the address after the last one. Zeroed data needs no copy, because the
/// memory is zero already.
fn put_kernel(kernel: &Kernel, ram: &GuestRam) -> Result<Gpa, LoadError> {
    let segments = kernel.segments()?;
    let start = segments.iter().map(|s| s.start).min().unwrap_or_default();
    let end = segments.iter().map(Segment::end).max().unwrap_or_default();
    if start < layout::HIGH {
        let what = format!("it wants to be loaded at {start}, below 1 MiB");
        return Err(KernelError::Damaged { what }.into());
    }
    if end > ram.low_end().0 {
        return Err(LoadError::KernelTooLarge {
            needed: end,
            memory_mib: ram.size() >> 20,
            end: ram.low_end().0,
        });
    }
    for segment in &segments {
        ram.write(segment.start, segment.bytes).map_err(missing)?;
    }
    Ok(Gpa(end))
}

/// Copies the archives into consecutive memory, which begins at the highest page boundary from which they fit below
/// `top`. Returns the start and size in bytes of that memory; `None` if the archives are empty.
fn put_initrd(
    ram: &GuestRam,
    parts: &[&[u8]],
    kernel_end: Gpa,
    top: u64,
) -> Result<Option<(Gpa, u64)>, LoadError> {
    let size = initrd_len(parts);
    if size == 0 {
        return Ok(None);
    }
    let bottom = kernel_end.0.next_multiple_of(PAGE);
    let start = top
        .checked_sub(size)
        .map(|start| start / PAGE * PAGE)
        .filter(|start| *start >= bottom)
        .ok_or_else(|| LoadError::InitrdTooLarge {
            size,
            free: top.saturating_sub(bottom) / PAGE * PAGE,
            memory_mib: ram.size() >> 20,
        })?;
    let mut at = Gpa(start);
    for part in parts {
        ram.write(at, part).map_err(missing)?;
        at = at.wrapping_add(padded(part));
    }
    Ok(Some((Gpa(start), size)))
}

/// Returns the length in bytes of an archive with what follows it: the kernel expects each archive at a multiple of
/// four bytes, and skips zeros between them.
fn padded(part: &[u8]) -> u64 {
    (part.len() as u64).next_multiple_of(4)
}

/// Returns the number of bytes that the archives `parts` need together.
pub(super) fn initrd_len(parts: &[&[u8]]) -> u64 {
    parts.iter().map(|part| padded(part)).sum()
}

/// The boot parameters, one page.
struct Params([u8; 4096]);

impl Params {
    fn new() -> Self {
        Self([0; 4096])
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Sets a 32-bit field to an address or a size. Fails at 4 GiB or more; all values that the loader uses are
    /// below.
    fn set_address(&mut self, at: usize, value: Gpa) -> Result<(), LoadError> {
        let value = u32::try_from(value.0).map_err(|_| LoadError::NoMemory(value))?;
        self.set(at, &value.to_le_bytes());
        Ok(())
    }

    fn set_memory_map(&mut self, ram: &GuestRam) {
        let mut map = vec![
            (Gpa(0), layout::FIRMWARE, Kind::Ram),
            (layout::FIRMWARE, layout::ACPI, Kind::Reserved),
            (layout::ACPI, layout::HIGH, Kind::Acpi),
            (layout::HIGH, ram.low_end(), Kind::Ram),
        ];
        if ram.ram_end().0 > HOLE_END {
            map.push((Gpa(HOLE_END), ram.ram_end(), Kind::Ram));
        }
        let mut at = field::E820_TABLE;
        for (start, end, kind) in map {
            self.set(at, &start.0.to_le_bytes());
            self.set(at + 8, &(end.0 - start.0).to_le_bytes());
            self.set(at + 16, &(kind as u32).to_le_bytes());
            at += 20;
            self.0[field::E820_ENTRIES] += 1;
        }
    }
}
