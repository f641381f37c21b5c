//! The units of debug information, and finding those that can say something.
//!
//! What is kept true: a unit is looked into only if the name that is asked for is in its bytes. No index is
//! built, as looking for a name's place in the whole of .debug_info takes less time than one question should.
//! Tables of abbreviations share no bytes, so reading all of them takes no longer than the section is long.

use std::ops::Range;
use std::sync::Arc;

use gimli::{
    AttributeValue, DebugAbbrevOffset, DebugFrame, DebuggingInformationEntry, Dwarf, EndianSlice,
    LittleEndian, Section as _, UnitHeader, UnitOffset, UnitType,
};
use memchr::memmem::Finder;

use super::budget::Budget;
use super::error::{BuildId, DebugError};
use super::file::DebugFile;

pub(super) type Reader<'f> = EndianSlice<'f, LittleEndian>;
pub(super) type Entry<'f> = DebuggingInformationEntry<Reader<'f>>;
pub(super) type Value<'f> = AttributeValue<Reader<'f>>;

/// More units than a kernel has source files, with all its drivers.
const MOST_UNITS: usize = 1 << 17;
/// Places of a name in the table of names, beyond which all units are looked into: a name ends others, too.
const MOST_NEEDLES: usize = 16;
/// Bytes that are searched in a step.
const SEARCHED: usize = 64;

/// The debug information of one kernel.
#[derive(Debug)]
pub struct DebugInfo<'f> {
    pub(super) dwarf: Dwarf<Reader<'f>>,
    pub(super) frame: DebugFrame<Reader<'f>>,
    pub(super) budget: Budget,
    units: Vec<(Range<usize>, UnitHeader<Reader<'f>>)>,
    /// Where tables of abbreviations begin, in their order.
    abbreviations: Vec<usize>,
}

/// A unit of debug information.
#[derive(Debug)]
pub(super) struct Unit<'a, 'f> {
    /// What it is of.
    pub(super) info: &'a DebugInfo<'f>,
    /// Its number.
    pub(super) index: usize,
    /// Where it begins in .debug_info.
    start: usize,
    /// Its header and tables.
    pub(super) own: gimli::Unit<Reader<'f>>,
}

impl<'f> DebugInfo<'f> {
    /// The debug information in `file`, for the kernel with this build id.
    ///
    /// # Errors
    /// When it is that of another kernel, or of none that can be told; when its units are damaged.
    pub fn new(file: &'f DebugFile, build_id: Option<&[u8]>) -> Result<Self, DebugError> {
        if file.build_id.is_none() || file.build_id.as_deref() != build_id {
            return Err(DebugError::OtherKernel {
                file: BuildId(file.build_id.clone()),
                kernel: BuildId(build_id.map(<[u8]>::to_vec)),
            });
        }
        let borrow = |bytes: &'f Vec<u8>| EndianSlice::new(bytes, LittleEndian);
        let dwarf = file.sections.borrow(borrow);
        let bytes = dwarf.debug_info.reader().len() + dwarf.debug_line.reader().len();
        if dwarf.debug_info.reader().is_empty() {
            return Err(DebugError::None);
        }
        let mut units = Vec::new();
        let mut headers = dwarf.units();
        let mut at = 0;
        while let Some(header) = headers.next().map_err(|source| DebugError::Damaged {
            section: ".debug_info",
            unit: at,
            source,
        })? {
            let end = at + header.length_including_self();
            if units.len() == MOST_UNITS {
                return Err(DebugError::TooMuch);
            }
            match header.type_() {
                UnitType::Compilation | UnitType::Partial => units.push((at..end, header)),
                UnitType::Skeleton(_) => return Err(DebugError::Split(at)),
                // Types only, or what is never in a linked file.
                _ => {}
            }
            at = end;
        }
        let offsets = units.iter().map(|(_, unit)| unit.debug_abbrev_offset().0);
        let mut abbreviations: Vec<_> = offsets.collect();
        abbreviations.sort_unstable();
        abbreviations.dedup();
        Ok(Self {
            dwarf,
            frame: DebugFrame::new(&file.frame, LittleEndian),
            budget: Budget::new(bytes),
            units,
            abbreviations,
        })
    }

    /// The unit with that number.
    pub(super) fn unit(&self, index: usize) -> Result<Unit<'_, 'f>, DebugError> {
        let Some((range, header)) = self.units.get(index) else {
            return Err(DebugError::None);
        };
        let unit = range.start;
        let damaged = |section, source| DebugError::Damaged {
            section,
            unit,
            source,
        };
        let start = header.debug_abbrev_offset().0;
        let next = self.abbreviations.partition_point(|&at| at <= start);
        let table = self.dwarf.debug_abbrev.reader().slice();
        let end = self.abbreviations.get(next).copied().unwrap_or(table.len());
        let table = table.get(start..end).unwrap_or_default();
        self.budget.spend(table.len() / SEARCHED + 1)?;
        let table = gimli::DebugAbbrev::new(table, LittleEndian);
        let table = table.abbreviations(DebugAbbrevOffset(0));
        let table = table.map_err(|source| damaged(".debug_abbrev", source))?;
        let own = gimli::Unit::new_with_abbreviations(&self.dwarf, *header, Arc::new(table));
        let own = own.map_err(|source| damaged(".debug_info", source))?;
        if own.dwo_id.is_some() {
            return Err(DebugError::Split(range.start));
        }
        let lines = own.line_program.as_ref().map_or(0, |program| {
            program.header().file_names().len() + program.header().include_directories().len()
        });
        self.budget.spend(lines)?;
        Ok(Unit {
            info: self,
            index,
            start: range.start,
            own,
        })
    }

    /// How many units there are.
    pub(super) fn unit_count(&self) -> usize {
        self.units.len()
    }

    /// The units that `name` may be in, by their numbers.
    pub(super) fn units_naming(&self, name: &str) -> Result<Vec<usize>, DebugError> {
        let all = || Ok((0..self.units.len()).collect());
        if !self.dwarf.debug_str_offsets.reader().is_empty() {
            // Names may be told by numbers.
            return all();
        }
        let mut wanted = name.as_bytes().to_vec();
        wanted.push(0);
        let wanted = Finder::new(&wanted);
        let names = self.dwarf.debug_str.reader().slice();
        let places = wanted.find_iter(names).take(MOST_NEEDLES + 1);
        // An offset has four bytes, or eight, of which the first four are found.
        let low = |at: usize| u32::try_from(at & 0xffff_ffff).unwrap_or(0).to_le_bytes();
        let needles: Vec<_> = places.map(low).collect();
        if needles.len() > MOST_NEEDLES {
            return all();
        }
        // Short names stand where they are used.
        let needles = needles.iter().map(Finder::new).chain([wanted]);
        let needles: Vec<_> = needles.collect();
        let info = self.dwarf.debug_info.reader().slice();
        self.budget
            .spend((names.len() + info.len() * needles.len()) / SEARCHED)?;
        let has = |range: &Range<usize>| {
            let bytes = info.get(range.clone()).unwrap_or_default();
            needles.iter().any(|needle| needle.find(bytes).is_some())
        };
        let units = self.units.iter().enumerate();
        let found = units.filter(|(_, (range, _))| has(range));
        Ok(found.map(|(index, _)| index).collect())
    }
}

impl<'f> Unit<'_, 'f> {
    /// What is wrong with it, while a section was read for it.
    pub(super) fn damaged(&self, section: &'static str, source: gimli::Error) -> DebugError {
        DebugError::Damaged {
            section,
            unit: self.start,
            source,
        }
    }

    /// Its entry at `at`.
    pub(super) fn entry(&self, at: UnitOffset) -> Result<Entry<'f>, DebugError> {
        let entry = self.own.entry(at);
        let entry = entry.map_err(|source| self.damaged(".debug_info", source))?;
        self.info.budget.spend(entry.attrs().len() + 1)?;
        Ok(entry)
    }

    /// A text that an attribute has, if it is one.
    pub(super) fn text(&self, value: Value<'f>) -> Option<&'f [u8]> {
        let text = self.info.dwarf.attr_string(&self.own, value).ok()?.slice();
        self.info.budget.spend(text.len() / SEARCHED + 1).ok()?;
        Some(text)
    }
}
