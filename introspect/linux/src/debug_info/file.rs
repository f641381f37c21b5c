//! A file with debug information, of which only that is read.
//!
//! What is kept true: the sections are within the file and share no bytes, so they take no more memory than
//! the file is long. A kernel's file is much longer than its debug information, half of it relocations that
//! were applied long ago, so the rest is left where it is. Nothing is mapped: a file that changes later does
//! no harm.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use gimli::{DwarfSections, SectionId};
use object::read::elf::{ElfFile64, FileHeader};
use object::{CompressionFormat, LittleEndian, Object, ObjectSection, ReadCache, ReadRef, elf};

use super::error::{BuildId, DebugError};
use super::module::{ModuleFile, Placed};
use crate::notes::build_id;

/// More sections than a kernel has: look-ups go through all of them.
const MOST_SECTIONS: usize = 4096;

/// Sections of notes that are looked into, and bytes of each; kernels have one or two short ones.
const MOST_NOTES: usize = 8;
const LONGEST_NOTES: u64 = 1 << 16;

/// Sections that nothing is asked of.
const UNUSED: [SectionId; 5] = [
    SectionId::DebugAranges,
    SectionId::DebugMacinfo,
    SectionId::DebugMacro,
    SectionId::DebugNames,
    SectionId::DebugTypes,
];

/// The debug information of a kernel or of a module, read from its file.
pub struct DebugFile {
    pub(super) sections: DwarfSections<Vec<u8>>,
    /// How stack frames are laid out.
    pub(super) frame: Vec<u8>,
    pub(super) build_id: Option<Vec<u8>>,
    module: Option<ModuleFile>,
}

impl std::fmt::Debug for DebugFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DebugFile")
            .field("build_id", &BuildId(self.build_id.clone()).to_string())
            .finish_non_exhaustive()
    }
}

/// The file at `path`, which may be no other than a regular one.
fn regular(path: &Path) -> Result<File, DebugError> {
    // A pipe would be waited for, and a device has no end.
    if !fs::metadata(path).map_err(DebugError::Read)?.is_file() {
        return Err(DebugError::Read(io::Error::other(
            "it is not a regular file",
        )));
    }
    File::open(path).map_err(DebugError::Read)
}

/// The bytes of sections.
type Fetch<'f> = &'f dyn Fn(u64, &mut [u8]) -> Result<(), DebugError>;

impl DebugFile {
    /// Reads the debug information in the file at `path`.
    ///
    /// # Errors
    /// When there is none, or none that can be used.
    pub fn open(path: &Path) -> Result<Self, DebugError> {
        Self::of(&regular(path)?)
    }

    /// Whether the file at `path` is an object file, as a module's is, which takes no look at the rest of it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn is_unlinked(path: &Path) -> Result<bool, DebugError> {
        // The beginning of an ELF file, up to its type and with it (`struct Elf64_Ehdr`).
        let mut header = [0; 18];
        let file = regular(path)?;
        let begins = match file.read_exact_at(&mut header, 0) {
            Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            read => read.map_err(DebugError::Read),
        };
        begins?;
        let [magic @ .., low, high] = header;
        let ty = elf::FileType(u16::from_le_bytes([low, high]));
        Ok(magic.starts_with(&elf::ELFMAG) && ty == elf::ET_REL)
    }

    /// Reads the debug information in `file`, from its beginning. Nobody else may read it meanwhile, as the
    /// position is shared.
    ///
    /// # Errors
    /// When there is none, or none that can be used.
    pub fn of(file: &File) -> Result<Self, DebugError> {
        let len = file.metadata().map_err(DebugError::Read)?.len();
        let again = file.try_clone().map_err(DebugError::Read)?;
        let cache = ReadCache::new(again);
        Self::read(&cache, len, &|at, bytes| {
            file.read_exact_at(bytes, at).map_err(DebugError::Read)
        })
    }

    /// Reads the debug information in a file of these bytes.
    ///
    /// # Errors
    /// When there is none, or none that can be used.
    pub fn parse(bytes: &[u8]) -> Result<Self, DebugError> {
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        Self::read(bytes, len, &|at, wanted| {
            let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
            let found = rest.and_then(|rest| rest.get(..wanted.len()));
            wanted.copy_from_slice(found.ok_or(DebugError::Overlap)?);
            Ok(())
        })
    }

    /// What it says of its module, if it is of one and not of a kernel.
    #[must_use]
    pub fn module(&self) -> Option<&ModuleFile> {
        self.module.as_ref()
    }

    /// What tells which build of a kernel or a module it is of, if it says so.
    #[must_use]
    pub fn build_id(&self) -> Option<&[u8]> {
        self.build_id.as_deref()
    }

    fn read<'d>(data: impl ReadRef<'d>, len: u64, fetch: Fetch<'_>) -> Result<Self, DebugError> {
        let file = ElfFile64::<LittleEndian, _>::parse(data).map_err(DebugError::NotElf)?;
        let header = file.elf_header();
        let machine = header.e_machine(LittleEndian);
        if machine != elf::EM_X86_64 {
            return Err(DebugError::Machine(machine.0));
        }
        if file.elf_section_table().len() > MOST_SECTIONS
            || file.elf_program_headers().len() > MOST_SECTIONS
        {
            return Err(DebugError::Overlap);
        }
        let mut placed = match header.e_type(LittleEndian) {
            elf::ET_EXEC | elf::ET_DYN => None,
            elf::ET_REL => Some(Placed::of(&file, len)?.ok_or(DebugError::Unlinked)?),
            _ => return Err(DebugError::Unlinked),
        };
        let module = placed.as_ref().map(|placed| placed.module(&file));
        let mut left = len;
        let mut load = |id: SectionId| -> Result<Vec<u8>, DebugError> {
            let name = id.name();
            let mut sections = file.sections();
            let Some(section) = sections.find(|it| it.name_bytes() == Ok(name.as_bytes())) else {
                return Ok(Vec::new());
            };
            let range = section.compressed_file_range();
            let range = range.map_err(DebugError::NotElf)?;
            if range.format != CompressionFormat::None {
                return Err(DebugError::Compressed(name));
            }
            let at = range.offset;
            let size = range.uncompressed_size;
            if at.checked_add(size).is_none_or(|end| end > len) {
                return Err(DebugError::Cut(name));
            }
            left = left.checked_sub(size).ok_or(DebugError::Overlap)?;
            let mut bytes = vec![0; usize::try_from(size).map_err(|_| DebugError::Cut(name))?];
            fetch(at, &mut bytes)?;
            if let Some(placed) = &mut placed {
                placed.relocate(&file, &section, name, &mut bytes)?;
            }
            Ok(bytes)
        };
        let sections = DwarfSections::load(|id| match UNUSED.contains(&id) {
            true => Ok(Vec::new()),
            false => load(id),
        })?;
        let frame = load(SectionId::DebugFrame)?;
        let notes = file.sections().filter(|section| {
            let name = section.name_bytes().unwrap_or_default();
            name.starts_with(b".note") && section.size() <= LONGEST_NOTES
        });
        let mut notes = notes.take(MOST_NOTES);
        let build_id = notes.find_map(|section| build_id(section.data().ok()?));
        Ok(Self {
            sections,
            frame,
            build_id: build_id.map(<[u8]>::to_vec),
            module,
        })
    }
}
