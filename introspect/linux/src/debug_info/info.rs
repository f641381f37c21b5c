//! Units of debug information, found through the index.
//!
//! Invariants: a unit's bytes are read only when a question needs the unit. Each abbreviation table ends where the
//! next one begins, so the tables share no bytes, and all of them together are no longer than their section.

use std::cell::OnceCell;
use std::sync::Arc;

use gimli::{
    AttributeValue, DebugAbbrevOffset, DebuggingInformationEntry, Dwarf, EndianSlice, LittleEndian,
    Section as _, UnitOffset,
};

use super::budget::Budget;
use super::error::DebugError;
use super::file::DebugFile;
use super::index::{Index, UnitPlace};

pub(super) type Reader<'f> = EndianSlice<'f, LittleEndian>;
pub(super) type Entry<'f> = DebuggingInformationEntry<Reader<'f>>;
pub(super) type Value<'f> = AttributeValue<Reader<'f>>;

/// Number of bytes of a string or table that cost one step of the budget.
const READ: usize = 64;

/// The debug information of one kernel or module.
#[derive(Debug)]
pub struct DebugInfo<'f> {
    pub(super) dwarf: Dwarf<Reader<'f>>,
    pub(super) budget: Budget,
    pub(super) file: &'f DebugFile,
    /// The sections in `dwarf`, together with the location lists of variables. Read when first needed.
    with_locations: OnceCell<Dwarf<Reader<'f>>>,
    units: &'f [UnitPlace],
    index: Option<&'f Index>,
    /// All bytes of `.debug_info`; `None` except while the index is built.
    whole: Option<&'f [u8]>,
    /// Sorted offsets at which abbreviation tables begin.
    abbreviations: Vec<usize>,
}

/// A unit of debug information.
#[derive(Debug)]
pub(super) struct Unit<'a, 'f> {
    /// The debug information that the unit belongs to.
    pub(super) info: &'a DebugInfo<'f>,
    /// The number of the unit.
    pub(super) index: usize,
    /// Offset of the unit in `.debug_info`.
    start: usize,
    /// The header and tables of the unit.
    pub(super) own: gimli::Unit<Reader<'f>>,
}

impl<'f> DebugInfo<'f> {
    /// Creates the debug information that consists of `units`. `whole` is all of `.debug_info`, if it was read.
    pub(super) fn over(
        file: &'f DebugFile,
        units: &'f [UnitPlace],
        index: Option<&'f Index>,
        whole: Option<&'f [u8]>,
    ) -> Result<Self, DebugError> {
        let dwarf = file.dwarf(false)?;
        let bytes = file
            .info
            .len
            .saturating_add(dwarf.debug_line.reader().len());
        let mut abbreviations: Vec<_> = units.iter().map(UnitPlace::abbreviations).collect();
        abbreviations.sort_unstable();
        abbreviations.dedup();
        Ok(Self {
            dwarf,
            budget: Budget::new(bytes, &file.abandoned),
            file,
            with_locations: OnceCell::new(),
            units,
            index,
            whole,
            abbreviations,
        })
    }

    /// Returns the numbers of the units that have code of a function called `name`.
    pub(super) fn units_with_function(&self, name: &str) -> Vec<usize> {
        let found = self.index.map(|index| index.units_with_function(name));
        found.unwrap_or_default()
    }

    /// Returns the numbers of the units that use a file with the same name as the file at `path`.
    pub(super) fn units_with_file(&self, path: &str) -> Vec<usize> {
        let found = self.index.map(|index| index.units_with_file(path));
        found.unwrap_or_default()
    }

    /// Returns the number of the unit whose code covers `at`.
    pub(super) fn unit_at(&self, at: u64) -> Option<usize> {
        self.index?.unit_at(at)
    }

    /// Returns the sections of the debug information, including the location lists of variables.
    pub(super) fn with_locations(&self) -> Result<&Dwarf<Reader<'f>>, DebugError> {
        match self.with_locations.get() {
            Some(dwarf) => Ok(dwarf),
            None => {
                let dwarf = self.file.dwarf(true)?;
                Ok(self.with_locations.get_or_init(|| dwarf))
            }
        }
    }

    /// Reads the unit with number `index`.
    pub(super) fn unit(&self, index: usize) -> Result<Unit<'_, 'f>, DebugError> {
        let Some(place) = self.units.get(index) else {
            return Err(DebugError::None);
        };
        let range = place.range();
        let unit = range.start;
        let damaged = |section, source| DebugError::Damaged {
            section,
            unit,
            source,
        };
        let bytes = match self.whole {
            Some(whole) => whole.get(range).unwrap_or_default(),
            None => self.file.unit(index, place)?,
        };
        let headers = gimli::DebugInfo::from(EndianSlice::new(bytes, LittleEndian));
        let header = headers.units().next();
        let header = header.map_err(|source| damaged(".debug_info", source))?;
        let header = header.ok_or(DebugError::Cut(".debug_info"))?;
        let start = header.debug_abbrev_offset().0;
        let next = self.abbreviations.partition_point(|&at| at <= start);
        let table = self.dwarf.debug_abbrev.reader().slice();
        let end = self.abbreviations.get(next).copied().unwrap_or(table.len());
        let table = table.get(start..end).unwrap_or_default();
        self.budget.spend(table.len() / READ + 1)?;
        let table = gimli::DebugAbbrev::new(table, LittleEndian);
        let table = table.abbreviations(DebugAbbrevOffset(0));
        let table = table.map_err(|source| damaged(".debug_abbrev", source))?;
        let own = gimli::Unit::new_with_abbreviations(&self.dwarf, header, Arc::new(table));
        let own = own.map_err(|source| damaged(".debug_info", source))?;
        if own.dwo_id.is_some() {
            return Err(DebugError::Split(unit));
        }
        let lines = own.line_program.as_ref().map_or(0, |program| {
            program.header().file_names().len() + program.header().include_directories().len()
        });
        self.budget.spend(lines)?;
        Ok(Unit {
            info: self,
            index,
            start: unit,
            own,
        })
    }
}

impl<'f> Unit<'_, 'f> {
    /// Returns the error for damage found in `section` while it was read for this unit.
    pub(super) fn damaged(&self, section: &'static str, source: gimli::Error) -> DebugError {
        DebugError::Damaged {
            section,
            unit: self.start,
            source,
        }
    }

    /// Reads the entry at offset `at` of the unit.
    pub(super) fn entry(&self, at: UnitOffset) -> Result<Entry<'f>, DebugError> {
        let entry = self.own.entry(at);
        let entry = entry.map_err(|source| self.damaged(".debug_info", source))?;
        self.info.budget.spend(entry.attrs().len() + 1)?;
        Ok(entry)
    }

    /// Returns the string that an attribute refers to; `None` if the attribute is not a string, or if the string
    /// cannot be read.
    pub(super) fn text(&self, value: Value<'f>) -> Option<&'f [u8]> {
        let text = self.info.dwarf.attr_string(&self.own, value).ok()?.slice();
        self.info.budget.spend(text.len() / READ + 1).ok()?;
        Some(text)
    }
}
