//! Moves a kernel to other addresses than those at which it is linked, as its decompressor would have done.
//!
//! A kernel that can be moved has lists of relocations after its ELF file, in the payload of the `bzImage`
//! (arch/x86/tools/relocs.c). They are 32-bit words, and the kernel's decompressor reads them from the end
//! (`handle_relocations` in arch/x86/boot/compressed/misc.c):
//!
//! ```text
//!   ELF file | 0 | 64-bit fields | 0 | inverse 32-bit fields | 0 | 32-bit fields
//! ```
//!
//! A word is the low half of the virtual address of a field. Kernels since 6.15, whose per-CPU data is linked like
//! other data, have no list of inverse fields, nor the zero before it.
//!
//! Invariants: a field is changed only inside of the bytes that a segment loads. The ELF headers of a moved kernel
//! have its new addresses, so the file is what the guest has in memory.

use std::ops::Range;

use object::LittleEndian as Le;
use object::elf::{
    FileHeader64, PT_LOAD, ProgramHeader64, SHT_NOBITS, SHT_SYMTAB, SectionHeader64,
};
use object::pod::{Pod, slice_from_bytes_mut};
use object::read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _};

use super::elf::{damaged, header};
use super::error::{Immovable, KernelError};

/// Start of the kernel's mapping: the virtual address of physical address 0, for a kernel that was not moved
/// (`__START_KERNEL_map` in arch/x86/include/asm/page_64_types.h).
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;

/// How far a kernel was moved from the addresses at which it is linked, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slide {
    /// Distance of the virtual addresses.
    pub virt: u64,
    /// Distance of the physical addresses.
    pub phys: u64,
}

/// The relocations of a kernel.
#[derive(Debug)]
pub(super) struct Relocations {
    /// End of the ELF file, and start of the relocations.
    elf_end: usize,
    /// Positions of the lists in the payload.
    words64: Range<usize>,
    inverse32: Range<usize>,
    words32: Range<usize>,
}

impl Relocations {
    /// Finds the relocations in `payload`, which begins with the kernel's ELF file.
    pub(super) fn find(payload: &[u8]) -> Result<Self, Immovable> {
        let (elf_end, has_symbols) = elf_end(payload)?;
        let words = payload.get(elf_end..).unwrap_or_default();
        if words.is_empty() {
            return Err(Immovable::NoRelocations);
        }
        if has_symbols {
            return Err(Immovable::HasSymbols);
        }
        let (words, []) = words.as_chunks::<4>() else {
            return Err(Immovable::Unknown);
        };
        let mut lists = words
            .iter()
            .enumerate()
            .filter(|(_, word)| **word == [0; 4])
            .map(|(index, _)| elf_end + 4 * index);
        let (Some(first), Some(second), third, None) =
            (lists.next(), lists.next(), lists.next(), lists.next())
        else {
            return Err(Immovable::Unknown);
        };
        if first != elf_end {
            return Err(Immovable::Unknown);
        }
        let last = third.unwrap_or(second);
        Ok(Self {
            elf_end,
            words64: first + 4..second,
            inverse32: (second + 4).min(last)..last,
            words32: last + 4..payload.len(),
        })
    }

    /// Moves the kernel in `payload` by `slide`, and cuts off the relocations, which have no meaning afterwards.
    pub(super) fn apply(&self, payload: &mut Vec<u8>, slide: Slide) -> Result<(), KernelError> {
        let relocations = payload.split_off(self.elf_end);
        let fields = Fields::of(payload)?;
        let list = |range: &Range<usize>| {
            let words = &relocations[range.start - self.elf_end..range.end - self.elf_end];
            words
                .as_chunks::<4>()
                .0
                .iter()
                .map(|word| u32::from_le_bytes(*word))
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "fields of 32 bits wrap at 32 bits"
        )]
        let slide32 = slide.virt as u32;
        for address in list(&self.words64) {
            let field = fields.at(payload, address)?;
            // Since 6.15, the build zeroes entries of ftrace's list. The kernel skips them whether they are moved
            // or not; zeros are what readers of the file skip, too.
            let value = u64::from_le_bytes(*field);
            if value != 0 {
                *field = value.wrapping_add(slide.virt).to_le_bytes();
            }
        }
        for address in list(&self.inverse32) {
            let field = fields.at(payload, address)?;
            *field = u32::from_le_bytes(*field)
                .wrapping_sub(slide32)
                .to_le_bytes();
        }
        for address in list(&self.words32) {
            let field = fields.at(payload, address)?;
            *field = u32::from_le_bytes(*field)
                .wrapping_add(slide32)
                .to_le_bytes();
        }
        move_headers(payload, slide)
    }
}

/// Returns the position after the last byte that belongs to the ELF file at the start of `payload`, and whether the
/// file has a table of symbols.
fn elf_end(payload: &[u8]) -> Result<(usize, bool), Immovable> {
    let file = header(payload).map_err(|_| Immovable::Unknown)?;
    let programs = file.program_headers(Le, payload);
    let sections = file.section_headers(Le, payload);
    let (Ok(programs), Ok(sections)) = (programs, sections) else {
        return Err(Immovable::Unknown);
    };
    let has_symbols = sections.iter().any(|it| it.sh_type(Le) == SHT_SYMTAB);
    let with_bytes = sections.iter().filter(|it| it.sh_type(Le) != SHT_NOBITS);
    let parts = [
        (file.e_phoff(Le), size_of_val(programs) as u64),
        (file.e_shoff(Le), size_of_val(sections) as u64),
    ]
    .into_iter()
    .chain(programs.iter().map(|it| (it.p_offset(Le), it.p_filesz(Le))))
    .chain(with_bytes.map(|it| (it.sh_offset(Le), it.sh_size(Le))));
    let end = parts.fold(0, |end: u64, (at, len)| end.max(at.saturating_add(len)));
    let end = usize::try_from(end).map_err(|_| Immovable::Unknown)?;
    Ok((end, has_symbols))
}

/// The bytes in the file that belong to segments, where relocated fields are.
struct Fields {
    /// Physical address of each segment and its position in the file, in the order of addresses. They do not overlap
    /// in memory.
    segments: Vec<(u64, Range<usize>)>,
}

impl Fields {
    fn of(elf: &[u8]) -> Result<Self, KernelError> {
        let programs = header(elf)?.program_headers(Le, elf);
        let programs = programs.map_err(|_| damaged("its program headers lie outside the file"))?;
        let loaded = programs
            .iter()
            .filter(|it| it.p_type(Le) == PT_LOAD && it.p_memsz(Le) != 0);
        let segments = loaded.filter_map(|it| {
            let start = usize::try_from(it.p_offset(Le)).ok()?;
            let len = usize::try_from(it.p_filesz(Le)).ok()?;
            Some((it.p_paddr(Le), start..start.checked_add(len)?))
        });
        let mut segments: Vec<_> = segments.collect();
        segments.sort_by_key(|(start, _)| *start);
        Ok(Self { segments })
    }

    /// Returns the field of `N` bytes whose virtual address has the low half `address`.
    fn at<'e, const N: usize>(
        &self,
        elf: &'e mut [u8],
        address: u32,
    ) -> Result<&'e mut [u8; N], KernelError> {
        // Per-CPU data is linked at other virtual addresses, but it is here by its physical ones, as it is loaded.
        let address = u64::from(address) | (KERNEL_MAP & !u64::from(u32::MAX));
        let found = address.checked_sub(KERNEL_MAP).and_then(|physical| {
            let after = self
                .segments
                .partition_point(|(start, _)| *start <= physical);
            let (start, bytes) = self.segments.get(after.checked_sub(1)?)?;
            let offset = usize::try_from(physical.checked_sub(*start)?).ok()?;
            let at = bytes.start.checked_add(offset)?;
            (at.checked_add(N)? <= bytes.end).then_some(at)
        });
        found
            .and_then(|at| elf.get_mut(at..)?.first_chunk_mut())
            .ok_or_else(|| {
                damaged(&format!(
                    "it has a relocation at {address:#x}, outside of it"
                ))
            })
    }
}

/// Adds `slide` to the addresses in the ELF headers.
fn move_headers(elf: &mut [u8], slide: Slide) -> Result<(), KernelError> {
    let moved = |address: u64| {
        if address < KERNEL_MAP {
            // Per-CPU data, at offsets from the CPU's area.
            address
        } else {
            address.wrapping_add(slide.virt)
        }
    };
    let file = header(elf)?;
    let programs = file.program_headers(Le, &*elf).map_or(0, <[_]>::len);
    let sections = file.section_headers(Le, &*elf).map_or(0, <[_]>::len);
    let (programs_at, sections_at) = (file.e_phoff(Le), file.e_shoff(Le));
    for program in table::<ProgramHeader64<Le>>(elf, programs_at, programs)? {
        let (at, physical) = (program.p_vaddr(Le), program.p_paddr(Le));
        program.p_vaddr.set(Le, moved(at));
        program.p_paddr.set(Le, physical.wrapping_add(slide.phys));
    }
    for section in table::<SectionHeader64<Le>>(elf, sections_at, sections)? {
        let at = section.sh_addr(Le);
        section.sh_addr.set(Le, moved(at));
    }
    for file in table::<FileHeader64<Le>>(elf, 0, 1)? {
        let entry = file.e_entry(Le);
        file.e_entry.set(Le, entry.wrapping_add(slide.phys));
    }
    Ok(())
}

/// Returns the `count` headers at the offset `at` of the file.
fn table<T: Pod>(elf: &mut [u8], at: u64, count: usize) -> Result<&mut [T], KernelError> {
    let rest = usize::try_from(at).ok().and_then(|at| elf.get_mut(at..));
    rest.and_then(|rest| slice_from_bytes_mut(rest, count).ok())
        .map(|(headers, _)| headers)
        .ok_or_else(|| damaged("its headers lie outside the file"))
}

#[cfg(test)]
mod tests;
