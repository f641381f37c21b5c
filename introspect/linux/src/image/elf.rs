//! The ELF file of a kernel: its contents, sections and symbols.
//!
//! Invariants: every slice that this module returns was bounds-checked against the file. Reading costs no more than
//! the file is long, even if the headers claim more: all sections together have no more bytes than the file, and
//! the same holds for all segments. Names may share bytes, so each is read only up to the length of the longest
//! name. Nothing is copied.

use std::ops::Range;

use hvprobe_arch::Gva;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader, SectionHeader, Sym};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol, SectionFlags, SectionIndex, elf};

use super::error::ImageError;
use crate::notes::build_id;
use crate::symbols::{RawSymbol, SymbolKind};

/// The lowest address of the kernel's half of the address space. Symbols below it are not addresses, but
/// per-CPU offsets or constants.
pub(super) const KERNEL_HALF: u64 = 1 << 63;

/// Maximum number of sections, and of segments. A kernel has fewer; look-ups go through all of them.
const MOST_PARTS: usize = 4096;
/// Maximum number of symbols; a kernel has fewer.
const MOST_SYMBOLS: usize = 1 << 22;
/// Length in bytes of the longest symbol name, with its NUL (`KSYM_NAME_LEN` from 6.1 on). The limit bounds the
/// work, as any number of names may share bytes.
const LONGEST_NAME: usize = 512;

/// A part of the image: a section, or a loaded segment.
#[derive(Clone, Debug)]
pub(super) struct Part<'a> {
    /// The section's name; empty for a segment.
    pub(super) name: &'a str,
    /// The addresses at which the part is linked.
    pub(super) at: Range<u64>,
    /// The bytes in the file. If there are fewer than addresses in `at`, the rest of the part is zero (`.bss`).
    pub(super) data: &'a [u8],
    /// Whether it holds code.
    pub(super) exec: bool,
}

/// A kernel's ELF file.
#[derive(Debug)]
pub(super) struct Elf<'a> {
    file: ElfFile64<'a, LittleEndian>,
    /// Loaded segments, each with its physical address.
    segments: Vec<(Part<'a>, u64)>,
    /// The sections that are loaded (`SHF_ALLOC`); empty if the file has no section headers.
    sections: Vec<Part<'a>>,
}

impl<'a> Elf<'a> {
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, ImageError> {
        let file = ElfFile64::<LittleEndian>::parse(bytes).map_err(ImageError::NotElf)?;
        let machine = file.elf_header().e_machine(LittleEndian);
        if machine != elf::EM_X86_64 {
            return Err(ImageError::Machine(machine.0));
        }
        if file.elf_section_table().len() > MOST_PARTS
            || file.elf_program_headers().len() > MOST_PARTS
        {
            return Err(ImageError::Overlap);
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
        let names = file
            .elf_header()
            .shstrndx(LittleEndian, bytes)
            .map(|index| strings(&file, SectionIndex(index.try_into().unwrap_or(0))))
            .unwrap_or_default();
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
                    name: name_at(names, section.elf_section_header().sh_name(LittleEndian))?,
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
        // Overlapping parts would let a small file claim any amount of content.
        let segments = elf.segments.iter().map(|(part, _)| part);
        if !within(elf.sections.iter(), bytes.len()) || !within(segments, bytes.len()) {
            return Err(ImageError::Overlap);
        }
        Ok(elf)
    }

    /// Returns the sections or, if the file has none, the segments.
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

    /// Returns the bytes of the file that are loaded at `at..at + len`.
    pub(super) fn read(&self, at: Gva, len: usize) -> Option<&'a [u8]> {
        self.segments.iter().find_map(|(part, _)| {
            let start = usize::try_from(at.0.checked_sub(part.at.start)?).ok()?;
            part.data.get(start..start.checked_add(len)?)
        })
    }

    /// Returns up to `len` bytes of the file that are loaded from `at` on; fewer if the segment has no more.
    pub(super) fn read_up_to(&self, at: Gva, len: usize) -> &'a [u8] {
        let rest = self.segments.iter().find_map(|(part, _)| {
            let start = usize::try_from(at.0.checked_sub(part.at.start)?).ok()?;
            part.data.get(start..).filter(|rest| !rest.is_empty())
        });
        let rest = rest.unwrap_or_default();
        &rest[..rest.len().min(len)]
    }

    /// Returns the range from the lowest to the highest address of the kernel.
    pub(super) fn extent(&self) -> Range<u64> {
        let kernel = || self.parts().filter(|part| part.at.start >= KERNEL_HALF);
        let start = kernel().map(|part| part.at.start).min().unwrap_or(0);
        start..kernel().map(|part| part.at.end).max().unwrap_or(0)
    }

    /// Returns the virtual minus the physical address of the segment that contains `at`, modulo 2^64.
    pub(super) fn virt_to_phys_offset(&self, at: Gva) -> Option<u64> {
        self.segments
            .iter()
            .find(|(part, _)| part.at.contains(&at.0))
            .map(|(part, phys)| part.at.start.wrapping_sub(*phys))
    }

    /// Returns the GNU build id.
    pub(super) fn build_id(&self) -> Option<&'a [u8]> {
        /// Maximum number of note segments to search; kernels have one or two.
        const MOST_NOTES: usize = 8;
        let sections = self.sections.iter();
        let sections = sections.filter(|part| part.name.starts_with(".note"));
        let headers = self.file.elf_program_headers().iter();
        let segments = headers
            .filter(|header| {
                self.sections.is_empty() && header.p_type(LittleEndian) == elf::PT_NOTE
            })
            .filter_map(|header| header.data(LittleEndian, self.file.data()).ok())
            .take(MOST_NOTES);
        let mut data = sections.map(|part| part.data).chain(segments);
        data.find_map(build_id)
    }

    /// Returns the symbols of the ELF symbol table; none for a stripped file.
    pub(super) fn symbols(&self) -> impl Iterator<Item = RawSymbol<'a>> {
        let names = strings(&self.file, self.file.elf_symbol_table().string_section());
        self.file.symbols().take(MOST_SYMBOLS).filter_map(|symbol| {
            let kind = match symbol.kind() {
                object::SymbolKind::Text => SymbolKind::Text,
                object::SymbolKind::Data | object::SymbolKind::Tls => SymbolKind::Data,
                // Assembly labels have no type, so the kind depends on what is at their addresses.
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
                name: name_at(names, symbol.elf_symbol().st_name(LittleEndian))?,
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

    /// Returns whether there is code at `at`.
    pub(super) fn is_code(&self, at: u64) -> bool {
        self.parts().any(|part| part.exec && part.at.contains(&at))
    }

    /// Returns whether any section or segment covers `at`.
    pub(super) fn is_loaded(&self, at: u64) -> bool {
        self.parts().any(|part| part.at.contains(&at))
    }
}

/// Returns the content of the string table in `section`; empty if there is no such section.
fn strings<'a>(file: &ElfFile64<'a, LittleEndian>, section: SectionIndex) -> &'a [u8] {
    file.elf_section_table()
        .section(section)
        .and_then(|section| section.data(LittleEndian, file.data()))
        .unwrap_or_default()
}

/// Returns the name that begins at offset `at` of a string table.
fn name_at(names: &[u8], at: u32) -> Option<&str> {
    let rest = names.get(usize::try_from(at).ok()?..)?;
    let rest = &rest[..rest.len().min(LONGEST_NAME)];
    str::from_utf8(&rest[..memchr::memchr(0, rest)?]).ok()
}

/// Returns whether there are at most `MOST_PARTS` parts whose bytes together fit into a file of `file` bytes.
fn within<'p, 'a: 'p>(parts: impl Iterator<Item = &'p Part<'a>>, file: usize) -> bool {
    let mut count = 0;
    let mut left = Some(file);
    for part in parts {
        count += 1;
        left = left.and_then(|left| left.checked_sub(part.data.len()));
    }
    count <= MOST_PARTS && left.is_some()
}

#[cfg(test)]
mod tests {
    use hvprobe_fixtures::kernel::{self, Section, TEXT};

    use super::*;
    use crate::symbols::{MOST_TEXT, Symbols};

    fn section(name: &'static str, data: Vec<u8>) -> Section {
        Section {
            name,
            at: TEXT,
            exec: true,
            data,
        }
    }

    /// Builds a file with `count` symbols whose names share the same bytes.
    fn sharing(name: &str, count: usize) -> Vec<u8> {
        let text = section(".text", vec![0x90; 0x100]);
        let mut bytes = kernel::elf(&[text], &[(name, TEXT, 0, true)]);
        // Moves the symbol table, which gets longer, to the end. Its section header is the third.
        let table = u64::from_le_bytes(bytes[40..48].try_into().unwrap());
        let header = usize::try_from(table).unwrap() + 2 * 64;
        let word = |at: usize| {
            usize::try_from(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())).unwrap()
        };
        let (start, len) = (word(header + 24), word(header + 32));
        let mut symbols = bytes[start..start + len].to_vec();
        let (undefined, one) = symbols.split_at(24);
        symbols = [undefined, &one.repeat(count)].concat();
        let start = bytes.len() as u64;
        let len = symbols.len() as u64;
        bytes[header + 24..header + 32].copy_from_slice(&start.to_le_bytes());
        bytes[header + 32..header + 40].copy_from_slice(&len.to_le_bytes());
        bytes.extend(symbols);
        bytes
    }

    #[test]
    fn names_are_read_no_further_than_a_name_goes() {
        for (len, count) in [(1, 4), (LONGEST_NAME - 1, 4), (LONGEST_NAME, 0)] {
            let bytes = sharing(&"n".repeat(len), 4);
            let elf = Elf::parse(&bytes).unwrap();
            assert_eq!(elf.symbols().count(), count, "{len} bytes");
        }
    }

    #[test]
    fn names_that_share_bytes_are_kept_up_to_a_limit() {
        const LEN: usize = 500;
        let count = MOST_TEXT / LEN;
        let bytes = sharing(&"n".repeat(LEN), count + 5);
        let elf = Elf::parse(&bytes).unwrap();
        assert_eq!(Symbols::new(elf.symbols(), &[]).len(), count);
    }

    #[test]
    fn thousands_of_sections_are_refused() {
        for (count, is_read) in [(MOST_PARTS, true), (MOST_PARTS + 1, false)] {
            let mut bytes = kernel::elf(&[], &[]);
            let table = u64::from_le_bytes(bytes[40..48].try_into().unwrap());
            bytes.resize(usize::try_from(table).unwrap() + count * 64, 0);
            bytes[60..62].copy_from_slice(&u16::try_from(count).unwrap().to_le_bytes());
            assert_eq!(Elf::parse(&bytes).is_ok(), is_read, "{count}");
        }
    }

    #[test]
    fn build_id_is_found_among_the_notes() {
        let mut notes = Vec::new();
        for (kind, description) in [(6_u32, b"other"), (3, b"build")] {
            for word in [4, 5, kind] {
                notes.extend(word.to_le_bytes());
            }
            notes.extend(b"GNU\0");
            notes.extend(description);
            notes.extend([0; 3]);
        }
        let bytes = kernel::elf(&[section(".notes", notes)], &[]);
        let elf = Elf::parse(&bytes).unwrap();
        assert_eq!(elf.build_id(), Some(&b"build"[..]));
        let bytes = kernel::elf(&[section(".text", vec![0; 64])], &[]);
        assert_eq!(Elf::parse(&bytes).unwrap().build_id(), None);
    }
}
