//! A file with debug information. Only the parts that a question needs are read.
//!
//! ```text
//!   opened ──▶ positions of the sections, build id ──a question──▶ index ──▶ units, tables that they need
//! ```
//! Invariants: each section lies within the file, all sections together are no longer than the file, and units
//! share no bytes. So all of them take no more memory than the file is long. Half of a kernel's file consists of
//! relocations that the linker has already applied, which are not read. A question reads only a few units of the
//! debug information. Nothing is mapped, so a file that changes later does no harm.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use gimli::{Dwarf, DwarfSections, EndianSlice, LittleEndian as Little, SectionId};
use object::read::elf::{ElfFile64, FileHeader};
use object::{CompressionFormat, LittleEndian, Object, ObjectSection, ReadCache, ReadRef, elf};

use super::error::{BuildId, DebugError};
use super::index::{Index, Of, UnitPlace, VERSION};
use super::later::{Later, once};
use super::module::{ModuleFile, Placed};
use crate::notes::build_id;

/// Maximum number of sections, and of segments. A kernel has fewer; look-ups go through all of them.
const MOST_SECTIONS: usize = 4096;

/// Maximum number of note sections to search; kernels have one or two.
const MOST_NOTES: usize = 8;
/// Maximum length of a note section, in bytes; longer ones are not searched.
const LONGEST_NOTES: u64 = 1 << 16;

/// Sections that are never read, and `.debug_info`, which is read unit by unit.
const UNUSED: [SectionId; 6] = [
    SectionId::DebugAranges,
    SectionId::DebugInfo,
    SectionId::DebugMacinfo,
    SectionId::DebugMacro,
    SectionId::DebugNames,
    SectionId::DebugTypes,
];

/// Long sections that are needed only for questions about variables.
const LOCATIONS: [SectionId; 2] = [SectionId::DebugLoc, SectionId::DebugLocLists];

/// The debug information of a kernel or of a module, read from its file.
pub struct DebugFile {
    /// The file to read from later; `None` if all of it was read at once.
    file: Option<File>,
    pub(super) info: Later,
    pub(super) sections: DwarfSections<Later>,
    /// The section `.debug_frame`: how stack frames are laid out.
    frame: Later,
    pub(super) build_id: Option<Vec<u8>>,
    module: Option<ModuleFile>,
    pub(super) index: OnceLock<Arc<Index>>,
    /// The bytes of each unit, indexed by unit number.
    units: OnceLock<Vec<OnceLock<Vec<u8>>>>,
    /// Set when nobody waits for answers any more.
    pub(super) abandoned: Arc<AtomicBool>,
}

impl std::fmt::Debug for DebugFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DebugFile")
            .field("build_id", &BuildId(self.build_id.clone()).to_string())
            .finish_non_exhaustive()
    }
}

/// Opens the file at `path`, which must be a regular file.
fn regular(path: &Path) -> Result<File, DebugError> {
    // Opening a pipe would block, and a device has no end.
    if !fs::metadata(path).map_err(DebugError::Read)?.is_file() {
        return Err(DebugError::Read(io::Error::other(
            "it is not a regular file",
        )));
    }
    File::open(path).map_err(DebugError::Read)
}

/// Function that reads bytes at an offset of the file. Used for sections that are read when the file is opened.
type Fetch<'f> = &'f dyn Fn(u64, &mut [u8]) -> Result<(), DebugError>;

impl DebugFile {
    /// Opens the debug information in the file at `path`.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a usable one. A file without debug information is accepted here, and
    /// refused by [`DebugInfo::new`](super::DebugInfo::new).
    pub fn open(path: &Path) -> Result<Self, DebugError> {
        Self::of(&regular(path)?)
    }

    /// Returns whether the file at `path` is an object file, such as that of a module. Reads only the ELF header.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn is_unlinked(path: &Path) -> Result<bool, DebugError> {
        // The first bytes of an ELF file, up to and including its type (`struct Elf64_Ehdr`).
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

    /// Opens the debug information in `file`. Reads from the beginning of the file, not from its file position.
    /// Nothing else may read `file` meanwhile, as the file position is shared.
    ///
    /// # Errors
    /// Those of [`DebugFile::open`].
    pub fn of(file: &File) -> Result<Self, DebugError> {
        let len = file.metadata().map_err(DebugError::Read)?.len();
        let again = || file.try_clone().map_err(DebugError::Read);
        let cache = ReadCache::new(again()?);
        let fetch = |at, bytes: &mut [u8]| file.read_exact_at(bytes, at).map_err(DebugError::Read);
        Self::read(&cache, len, &fetch, Some(again()?))
    }

    /// Opens the debug information in `bytes`, the content of a file.
    ///
    /// # Errors
    /// Those of [`DebugFile::open`].
    pub fn parse(bytes: &[u8]) -> Result<Self, DebugError> {
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let fetch = |at, wanted: &mut [u8]| {
            let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
            let found = rest.and_then(|rest| rest.get(..wanted.len()));
            wanted.copy_from_slice(found.ok_or(DebugError::Overlap)?);
            Ok(())
        };
        Self::read(bytes, len, &fetch, None)
    }

    /// Makes questions end with [`DebugError::Abandoned`] once `abandoned` is set. If an [index](Self::index) is
    /// being built at that time, it is completed first.
    #[must_use]
    pub fn until(self, abandoned: &Arc<AtomicBool>) -> Self {
        Self {
            abandoned: Arc::clone(abandoned),
            ..self
        }
    }

    /// Returns what the file says of its module; `None` if it is a kernel's file.
    #[must_use]
    pub fn module(&self) -> Option<&ModuleFile> {
        self.module.as_ref()
    }

    /// Returns the build id of the kernel or module to which the file belongs; `None` if the file has none.
    #[must_use]
    pub fn build_id(&self) -> Option<&[u8]> {
        self.build_id.as_deref()
    }

    /// Returns the length in bytes of `.debug_info` alone, without the other sections.
    #[must_use]
    pub fn length(&self) -> usize {
        self.info.len
    }

    /// Parses the index in `bytes`; `None` if it is damaged or of another file.
    #[must_use]
    pub fn read_index(&self, bytes: &[u8]) -> Option<Index> {
        Index::parse(bytes, &self.identity(), self.info.len)
    }

    /// Returns the identity that an index of this file records.
    pub(super) fn identity(&self) -> Of {
        let mut lengths = vec![self.info.len];
        self.sections.borrow(|part| {
            lengths.push(part.len);
            EndianSlice::new(&[], Little)
        });
        let lengths = lengths.into_iter().map(|len| len as u64);
        Of {
            version: VERSION,
            build_id: self.build_id.clone().unwrap_or_default(),
            lengths: lengths.collect(),
        }
    }

    /// Adopts `index`, which must be of this file. Then [`Self::index`] returns it instead of building one.
    pub fn adopt(&self, index: Arc<Index>) {
        let _ = self.index.set(index);
    }

    /// Returns the sections of the debug information other than `.debug_info`. The location lists of variables are
    /// included only if `locations` is set.
    pub(super) fn dwarf(
        &self,
        locations: bool,
    ) -> Result<Dwarf<EndianSlice<'_, Little>>, DebugError> {
        let mut failed = None;
        let dwarf = self.sections.borrow(|part| {
            let is_wanted = locations || !LOCATIONS.contains(&part.id);
            let read = match is_wanted {
                true => part.read(self.file.as_ref()),
                false => Ok([].as_slice()),
            };
            let bytes = read.unwrap_or_else(|why| {
                failed.get_or_insert(why);
                &[]
            });
            EndianSlice::new(bytes, Little)
        });
        failed.map_or(Ok(dwarf), Err)
    }

    /// Returns the section `.debug_frame`.
    pub(super) fn frame(&self) -> Result<&[u8], DebugError> {
        self.frame.read(self.file.as_ref())
    }

    /// Reads all of `.debug_info`.
    pub(super) fn whole_info(&self) -> Result<Vec<u8>, DebugError> {
        self.info.part(self.file.as_ref(), 0, self.info.len)
    }

    /// Returns the bytes of the unit at `place`, whose number in the index is `number`.
    pub(super) fn unit(&self, number: usize, place: &UnitPlace) -> Result<&[u8], DebugError> {
        let range = place.range();
        let cut = || DebugError::Cut(self.info.id.name());
        if let Some(whole) = self.info.read_already() {
            return whole.get(range).ok_or_else(cut);
        }
        let count = self.index.get().map_or(0, |index| index.units().len());
        let units = self
            .units
            .get_or_init(|| (0..count).map(|_| OnceLock::new()).collect());
        let read = || self.info.part(self.file.as_ref(), range.start, range.len());
        let bytes = once(units.get(number).ok_or_else(cut)?, read)?;
        Ok(bytes)
    }

    /// Reads a file of `len` bytes: its headers from `data`, and sections with `fetch`. If `later` is given and the
    /// file is a kernel's, its sections are read from `later` when they are first needed.
    fn read<'d>(
        data: impl ReadRef<'d>,
        len: u64,
        fetch: Fetch<'_>,
        later: Option<File>,
    ) -> Result<Self, DebugError> {
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
        let mut load = |id: SectionId| -> Result<Later, DebugError> {
            let name = id.name();
            let mut sections = file.sections();
            let Some(section) = sections.find(|it| it.name_bytes() == Ok(name.as_bytes())) else {
                return Ok(Later::known(id, Vec::new()));
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
            let size = usize::try_from(size).map_err(|_| DebugError::Cut(name))?;
            if placed.is_none() && later.is_some() {
                return Ok(Later::new(id, at, size));
            }
            let mut bytes = vec![0; size];
            fetch(at, &mut bytes)?;
            if let Some(placed) = &mut placed {
                placed.relocate(&file, &section, name, &mut bytes)?;
            }
            Ok(Later::known(id, bytes))
        };
        let sections = DwarfSections::load(|id| match UNUSED.contains(&id) {
            true => Ok(Later::known(id, Vec::new())),
            false => load(id),
        })?;
        let info = load(SectionId::DebugInfo)?;
        let frame = load(SectionId::DebugFrame)?;
        let notes = file.sections().filter(|section| {
            let name = section.name_bytes().unwrap_or_default();
            name.starts_with(b".note") && section.size() <= LONGEST_NOTES
        });
        let mut notes = notes.take(MOST_NOTES);
        let build_id = notes.find_map(|section| build_id(section.data().ok()?));
        Ok(Self {
            file: later,
            info,
            sections,
            frame,
            build_id: build_id.map(<[u8]>::to_vec),
            module,
            index: OnceLock::new(),
            units: OnceLock::new(),
            abandoned: Arc::default(),
        })
    }
}
