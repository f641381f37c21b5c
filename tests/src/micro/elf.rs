//! Writes the ELF file of a micro-kernel: one segment, one symbol table, one note.

use hvprobe_fixtures::dwarf::{BUILD_ID, note_of};

/// A symbol of the micro-kernel.
#[derive(Clone, Debug)]
pub(super) struct Symbol {
    pub(super) name: String,
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) code: bool,
}

const EHDR: usize = 64;
const PHDR: usize = 56;
const SHDR: usize = 64;
/// File offset of the segment, congruent with its address modulo the page size.
const CONTENT: usize = 0x1000;

struct Writer(Vec<u8>);

impl Writer {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Writes a section header (ELF-64 object file format, "Sections").
    #[allow(
        clippy::too_many_arguments,
        reason = "they are the fields of the header"
    )]
    fn section(
        &mut self,
        name: u32,
        kind: u32,
        flags: u64,
        addr: u64,
        offset: usize,
        size: usize,
        link: u32,
        entry: u64,
    ) {
        self.u32(name).u32(kind).u64(flags).u64(addr);
        self.u64(offset as u64).u64(size as u64);
        self.u32(link).u32(u32::from(kind == 2)).u64(16).u64(entry);
    }
}

/// Returns the ELF file: `content` at virtual address `virt` and physical address `phys`, with the entry point
/// at physical address `entry`. After the content is a note with the build id [`BUILD_ID`].
pub(super) fn write(
    content: &[u8],
    virt: u64,
    phys: u64,
    entry: u64,
    symbols: &[Symbol],
) -> Vec<u8> {
    let mut names = vec![0];
    let mut table = Writer(vec![0; 24]);
    for symbol in symbols {
        let name = u32::try_from(names.len()).unwrap_or(0);
        names.extend(symbol.name.as_bytes());
        names.push(0);
        // STB_GLOBAL with STT_FUNC or STT_OBJECT, in the only section with content.
        table
            .u32(name)
            .u16(if symbol.code { 0x12 } else { 0x11 })
            .u16(1);
        table.u64(symbol.addr).u64(symbol.size);
    }
    let mut content = content.to_vec();
    let text = content.len();
    content.resize(text.next_multiple_of(16), 0);
    let note_at = content.len();
    content.extend(note_of(BUILD_ID));
    let note = content.len() - note_at;
    let section_names = b"\0.text\0.symtab\0.strtab\0.shstrtab\0.note\0";
    let symbols_at = CONTENT + content.len();
    let names_at = symbols_at + table.0.len();
    let section_names_at = names_at + names.len();
    let sections_at = (section_names_at + section_names.len()).next_multiple_of(8);

    let mut file = Writer(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec());
    file.u16(2).u16(62).u32(1).u64(entry);
    file.u64(EHDR as u64).u64(sections_at as u64).u32(0);
    for size in [EHDR, PHDR, 1, SHDR, 6, 4] {
        file.u16(u16::try_from(size).unwrap_or(0));
    }
    file.u32(1).u32(7).u64(CONTENT as u64).u64(virt).u64(phys);
    file.u64(content.len() as u64)
        .u64(content.len() as u64)
        .u64(0x1000);
    file.0.resize(CONTENT, 0);
    file.0.extend(&content);
    file.0.extend(&table.0);
    file.0.extend(&names);
    file.0.extend(section_names);
    file.0.resize(sections_at, 0);
    file.section(0, 0, 0, 0, 0, 0, 0, 0);
    file.section(1, 1, 6, virt, CONTENT, text, 0, 0);
    file.section(7, 2, 0, 0, symbols_at, table.0.len(), 3, 24);
    file.section(15, 3, 0, 0, names_at, names.len(), 0, 0);
    file.section(23, 3, 0, 0, section_names_at, section_names.len(), 0, 0);
    let noted = virt + note_at as u64;
    file.section(33, 7, 2, noted, CONTENT + note_at, note, 0, 0);
    file.0
}
