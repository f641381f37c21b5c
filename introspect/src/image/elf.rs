//! The ELF file of a kernel: where its bytes, sections and symbols are.
//!
//! What is kept true: every slice handed out was bounds-checked against the file, so whatever the
//! headers claim, reading costs no more than the file is long. Nothing is copied.

use std::ops::Range;

use hvprobe_arch::Gva;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol, SectionFlags, elf};

use super::ImageError;
use crate::symbols::{RawSymbol, SymbolKind};

/// The lowest address of the kernel's half of the address space; whatever a symbol has below it
/// (a per-CPU offset, a constant) is no place.
pub(crate) const KERNEL_HALF: u64 = 1 << 63;

/// More sections or segments than a kernel has: look-ups go through all of them.
const MOST_PARTS: usize = 4096;

/// A part of the image: a section, or a loaded segment.
#[derive(Clone, Debug)]
pub(super) struct Part<'a> {
    /// The section's name; empty for a segment.
    pub(super) name: &'a str,
    /// The addresses it is linked to.
    pub(super) at: Range<u64>,
    /// Its bytes; fewer than `at` has addresses when the rest is zero (`.bss`).
    pub(super) data: &'a [u8],
    /// Whether it holds code.
    pub(super) exec: bool,
}

/// A kernel's ELF file.
#[derive(Debug)]
pub(super) struct Elf<'a> {
    file: ElfFile64<'a, LittleEndian>,
    /// Loaded segments with the physical address of each.
    segments: Vec<(Part<'a>, u64)>,
    /// Allocated sections; empty when the file has no section headers.
    sections: Vec<Part<'a>>,
}

impl<'a> Elf<'a> {
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, ImageError> {
        let file = ElfFile64::<LittleEndian>::parse(bytes).map_err(ImageError::NotElf)?;
        let machine = file.elf_header().e_machine(LittleEndian);
        if machine != elf::EM_X86_64 {
            return Err(ImageError::Machine(machine.0));
        }
        let segments = file
            .elf_program_headers()
            .iter()
            .filter(|header| header.p_type(LittleEndian) == elf::PT_LOAD)
            .filter_map(|header| {
                let start = header.p_vaddr(LittleEndian);
                let part = Part {
                    name: "",
                    at: start..start.checked_add(header.p_memsz(LittleEndian))?,
                    data: header.data(LittleEndian, bytes).ok()?,
                    exec: header.p_flags(LittleEndian).contains(elf::PF_X),
                };
                Some((part, header.p_paddr(LittleEndian)))
            })
            .collect();
        let sections = file
            .sections()
            .filter_map(|section| {
                let SectionFlags::Elf { sh_flags, .. } = section.flags() else {
                    return None;
                };
                if !sh_flags.contains(elf::SHF_ALLOC) {
                    return None;
                }
                let start = section.address();
                Some(Part {
                    name: section.name().ok()?,
                    at: start..start.checked_add(section.size())?,
                    data: section.data().ok()?,
                    exec: sh_flags.contains(elf::SHF_EXECINSTR),
                })
            })
            .collect();
        let elf = Self {
            file,
            segments,
            sections,
        };
        // Overlaps would let a small file claim any amount of content.
        let segments = elf.segments.iter().map(|(part, _)| part);
        if !within(elf.sections.iter(), bytes.len()) || !within(segments, bytes.len()) {
            return Err(ImageError::Overlap);
        }
        Ok(elf)
    }

    /// The sections, or the segments of a file without section headers.
    pub(super) fn parts(&self) -> impl Iterator<Item = &Part<'a>> {
        let sectionless = self.sections.is_empty();
        self.sections.iter().chain(
            self.segments
                .iter()
                .filter(move |_| sectionless)
                .map(|(part, _)| part),
        )
    }

    pub(super) fn section(&self, name: &str) -> Option<&Part<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// The bytes of the file that are loaded at `at..at + len`.
    pub(super) fn read(&self, at: Gva, len: usize) -> Option<&'a [u8]> {
        self.segments.iter().find_map(|(part, _)| {
            let start = usize::try_from(at.0.checked_sub(part.at.start)?).ok()?;
            part.data.get(start..start.checked_add(len)?)
        })
    }

    /// Virtual less physical address of the segment `at` lies in, modulo 2^64.
    pub(super) fn virt_to_phys_offset(&self, at: Gva) -> Option<u64> {
        self.segments
            .iter()
            .find(|(part, _)| part.at.contains(&at.0))
            .map(|(part, phys)| part.at.start.wrapping_sub(*phys))
    }

    /// The GNU build id.
    pub(super) fn build_id(&self) -> Option<&'a [u8]> {
        self.file.build_id().ok().flatten()
    }

    /// The symbol table, empty in a stripped file.
    pub(super) fn symbols(&self) -> impl Iterator<Item = RawSymbol<'a>> {
        self.file.symbols().filter_map(|symbol| {
            let kind = match symbol.kind() {
                object::SymbolKind::Text => SymbolKind::Text,
                object::SymbolKind::Data | object::SymbolKind::Tls => SymbolKind::Data,
                // Assembly labels carry no type: what matters is where they are.
                object::SymbolKind::Unknown | object::SymbolKind::Label => {
                    if self.is_code(symbol.address()) {
                        SymbolKind::Text
                    } else {
                        SymbolKind::Data
                    }
                }
                _ => return None,
            };
            if symbol.is_undefined() {
                return None;
            }
            Some(RawSymbol {
                name: symbol.name().ok()?,
                addr: Gva(symbol.address()),
                size: Some(symbol.size()).filter(|size| *size != 0),
                kind: if symbol.address() < KERNEL_HALF {
                    SymbolKind::Absolute
                } else {
                    kind
                },
            })
        })
    }

    fn is_code(&self, at: u64) -> bool {
        self.parts().any(|part| part.exec && part.at.contains(&at))
    }
}

/// Whether there are not too many parts and they have no more bytes together than the file.
fn within<'p, 'a: 'p>(parts: impl Iterator<Item = &'p Part<'a>>, file: usize) -> bool {
    let mut count = 0;
    let mut left = Some(file);
    for part in parts {
        count += 1;
        left = left.and_then(|left| left.checked_sub(part.data.len()));
    }
    count <= MOST_PARTS && left.is_some()
}
