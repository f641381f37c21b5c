//! Reads the notes of an ELF file.

use object::LittleEndian;
use object::elf::{ELF_NOTE_GNU, FileHeader64, NT_GNU_BUILD_ID};
use object::read::elf::NoteIterator;

/// Returns the GNU build id among the notes in `data`, the bytes of a section or segment.
pub(crate) fn build_id(data: &[u8]) -> Option<&[u8]> {
    let mut notes = NoteIterator::<FileHeader64<LittleEndian>>::new(LittleEndian, 4, data).ok()?;
    while let Ok(Some(note)) = notes.next() {
        if note.name() == ELF_NOTE_GNU && note.n_type(LittleEndian) == NT_GNU_BUILD_ID {
            return Some(note.desc());
        }
    }
    None
}
