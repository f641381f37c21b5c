//! Debug information of module files, which are linked only when they are loaded.
//!
//! ```text
//!   loaded sections ──▶ placed one after the other where modules may be ──▶ addresses of symbols
//!   .rela.debug_*   ──▶ those addresses, and offsets in other sections, written into the debug information
//! ```
//!
//! Invariants: everything about a module is reported relative to its symbols, so the addresses at which it is
//! really loaded do not matter. Nothing in the file is trusted: a relocation outside its section is an error, and
//! there are no more relocations than the file has room for.

use std::ops::Range;

use hvprobe_arch::Gva;
use object::elf::{self, SectionHeader64};
use object::read::elf::{ElfFile64, ElfSection64, SectionHeader as _};
use object::{
    LittleEndian, Object, ObjectSection, ObjectSymbol, ReadRef, RelocationKind, RelocationTarget,
    SectionFlags, SectionIndex,
};

use super::error::DebugError;
use crate::symbols::{RawSymbol, SymbolKind, Symbols};

/// The section that holds the `struct module` of a module. Every module has it (scripts/module.lds.S).
const THIS_MODULE: &[u8] = b".gnu.linkonce.this_module";
/// The section in which a module describes itself: strings of the form `WORD=VALUE`, separated by NULs.
const MODINFO: &[u8] = b".modinfo";
/// Range for the addresses assumed for module sections: where Linux loads modules. It does not contain 0, which
/// stands for a section that is not loaded.
const SPACE: Range<u64> = 0xffff_ffff_c000_0000..0xffff_ffff_ff00_0000;
/// Maximum number of symbols to read; no module has more.
const MOST_SYMBOLS: usize = 1 << 18;
/// Maximum length of `.modinfo`, in bytes; no module has a longer one.
const LONGEST_MODINFO: u64 = 1 << 20;
/// Length in bytes of the longest symbol name, with its NUL (`KSYM_NAME_LEN`).
const LONGEST_NAME: usize = 512;
/// Length in bytes of the longest module name. `MODULE_NAME_LEN`, which counts the NUL, is 64 minus the size of a
/// `long` (include/linux/moduleparam.h).
const LONGEST_MODULE_NAME: usize = 55;

type File<'d, R> = ElfFile64<'d, LittleEndian, R>;

/// The name and the symbols of a module, as its file gives them.
#[derive(Debug)]
pub struct ModuleFile {
    pub(super) name: Option<String>,
    pub(super) symbols: Symbols,
}

impl ModuleFile {
    /// Returns the name of the module; `None` if the file does not give a valid one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the module's symbols, at the addresses used for them in the debug information.
    #[must_use]
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }
}

/// Addresses assumed for the sections of a module.
#[derive(Debug)]
pub(super) struct Placed {
    /// Start addresses by section number; 0 for sections that are not loaded.
    starts: Vec<u64>,
    ranges: Vec<Range<u64>>,
    /// Number of relocations that may still be applied.
    left: u64,
}

impl Placed {
    /// Assigns addresses to the sections of `file`, which is `len` bytes long; `None` if it is not a module.
    pub(super) fn of<'d, R: ReadRef<'d>>(
        file: &File<'d, R>,
        len: u64,
    ) -> Result<Option<Self>, DebugError> {
        let named = |section: &ElfSection64<'d, '_, LittleEndian, R>| {
            section.name_bytes() == Ok(THIS_MODULE)
        };
        if !file.sections().any(|section| named(&section)) {
            return Ok(None);
        }
        let count = file.elf_section_table().len();
        let mut starts = vec![0; count];
        let mut ranges = Vec::new();
        let mut at = SPACE.start;
        for section in file.sections() {
            let SectionFlags::Elf { sh_flags, .. } = section.flags() else {
                continue;
            };
            let start = starts.get_mut(section.index().0);
            let Some(start) = start.filter(|_| sh_flags.contains(elf::SHF_ALLOC)) else {
                continue;
            };
            let begins = at.checked_next_multiple_of(section.align().max(1));
            let end = begins.and_then(|begins| begins.checked_add(section.size()));
            let (Some(begins), Some(end)) = (begins, end.filter(|end| *end <= SPACE.end)) else {
                return Err(DebugError::Overlap);
            };
            *start = begins;
            ranges.push(begins..end);
            // Leaves a gap, so that no section's end is the start of another.
            at = end + 1;
        }
        Ok(Some(Self {
            starts,
            ranges,
            left: len / size_of::<elf::Rela64<LittleEndian>>() as u64,
        }))
    }

    /// Applies the relocations of `section`, called `name`, to its `bytes`.
    pub(super) fn relocate<'d, R: ReadRef<'d>>(
        &mut self,
        file: &File<'d, R>,
        section: &ElfSection64<'d, '_, LittleEndian, R>,
        name: &'static str,
        bytes: &mut [u8],
    ) -> Result<(), DebugError> {
        for (at, relocation) in section.relocations() {
            self.left = self.left.checked_sub(1).ok_or(DebugError::Overlap)?;
            let wrong = || DebugError::Relocation { section: name, at };
            let base = match relocation.target() {
                RelocationTarget::Symbol(index) => {
                    let symbol = file.symbol_by_index(index).map_err(|_| wrong())?;
                    let section = symbol.section_index();
                    let start = section.and_then(|it| self.starts.get(it.0));
                    // A symbol in the kernel or in another module has no address here.
                    start.map_or(0, |start| start.wrapping_add(symbol.address()))
                }
                RelocationTarget::Absolute => 0,
                _ => return Err(wrong()),
            };
            if relocation.kind() != RelocationKind::Absolute {
                return Err(wrong());
            }
            let value = base.wrapping_add_signed(relocation.addend());
            let len = usize::from(relocation.size() / 8);
            let start = usize::try_from(at).map_err(|_| wrong())?;
            let place = start
                .checked_add(len)
                .and_then(|end| bytes.get_mut(start..end));
            let place = place.filter(|place| matches!(place.len(), 4 | 8));
            let place = place.ok_or_else(wrong)?;
            let value = value.to_le_bytes();
            place.copy_from_slice(value.get(..len).ok_or_else(wrong)?);
        }
        Ok(())
    }

    /// Reads the name and the symbols of the module from `file`.
    pub(super) fn module<'d, R: ReadRef<'d>>(&self, file: &File<'d, R>) -> ModuleFile {
        ModuleFile {
            name: name(file),
            symbols: self.symbols(file),
        }
    }

    fn symbols<'d, R: ReadRef<'d>>(&self, file: &File<'d, R>) -> Symbols {
        let names = file.elf_symbol_table().string_section();
        let names = section(file, names).and_then(|it| it.data(LittleEndian, file.data()).ok());
        let names = names.unwrap_or_default();
        let symbols = file.symbols().take(MOST_SYMBOLS).filter_map(|symbol| {
            let start = *self.starts.get(symbol.section_index()?.0)?;
            let addr = start.checked_add(symbol.address()).filter(|_| start != 0)?;
            let kind = match symbol.kind() {
                object::SymbolKind::Text => SymbolKind::Text,
                object::SymbolKind::Data => SymbolKind::Data,
                _ => return None,
            };
            let at = usize::try_from(symbol.elf_symbol().st_name.get(LittleEndian)).ok()?;
            let rest = names.get(at..)?;
            let rest = rest.get(..LONGEST_NAME).unwrap_or(rest);
            let end = rest.iter().position(|byte| *byte == 0)?;
            Some(RawSymbol {
                name: std::str::from_utf8(rest.get(..end)?).ok()?,
                addr: Gva(addr),
                size: Some(symbol.size()).filter(|size| *size != 0),
                kind,
            })
        });
        Symbols::new(symbols, &self.ranges)
    }
}

fn section<'f, 'd, R: ReadRef<'d>>(
    file: &'f File<'d, R>,
    index: SectionIndex,
) -> Option<&'f SectionHeader64<LittleEndian>> {
    file.elf_section_table().section(index).ok()
}

/// Returns the module's name from `.modinfo`; `None` if there is none or it is not valid.
fn name<'d, R: ReadRef<'d>>(file: &File<'d, R>) -> Option<String> {
    let mut sections = file.sections();
    let section = sections.find(|section| section.name_bytes() == Ok(MODINFO))?;
    if section.size() > LONGEST_MODINFO {
        return None;
    }
    let texts = section.data().ok()?.split(|byte| *byte == 0);
    let mut names = texts.filter_map(|text| text.strip_prefix(b"name="));
    let name = std::str::from_utf8(names.next()?).ok()?;
    is_module_name(name).then(|| name.to_owned())
}

/// Returns whether `name` is a valid name of a module.
#[must_use]
pub fn is_module_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    (1..=LONGEST_MODULE_NAME).contains(&name.len()) && name.chars().all(fits)
}
