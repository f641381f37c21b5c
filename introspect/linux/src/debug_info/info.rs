//! The units of debug information, as the index has them.
//!
//! What is kept true: a unit's bytes are read when something is asked of it. Tables of abbreviations share no bytes,
//! so reading all of them takes no longer than the section is long.

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

/// Bytes of a text or a table that are read in a step.
const READ: usize = 64;

/// The debug information of one kernel.
#[derive(Debug)]
pub struct DebugInfo<'f> {
    pub(super) dwarf: Dwarf<Reader<'f>>,
    pub(super) budget: Budget,
    pub(super) file: &'f DebugFile,
    /// With where variables are.
    with_locations: OnceCell<Dwarf<Reader<'f>>>,
    units: &'f [UnitPlace],
    index: Option<&'f Index>,
    /// All of `.debug_info`, if that was read.
    whole: Option<&'f [u8]>,
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
    /// The debug information of `units`, with all their bytes if they were read.
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

    /// The units that have code of functions called `name`, by their numbers.
    pub(super) fn units_with_function(&self, name: &str) -> Vec<usize> {
        let found = self.index.map(|index| index.units_with_function(name));
        found.unwrap_or_default()
    }

    /// The units with files that may be at `path`, by their numbers.
    pub(super) fn units_with_file(&self, path: &str) -> Vec<usize> {
        let found = self.index.map(|index| index.units_with_file(path));
        found.unwrap_or_default()
    }

    /// The number of the unit that the code at `at` is of.
    pub(super) fn unit_at(&self, at: u64) -> Option<usize> {
        self.index?.unit_at(at)
    }

    /// The tables, with where variables are.
    pub(super) fn with_locations(&self) -> Result<&Dwarf<Reader<'f>>, DebugError> {
        match self.with_locations.get() {
            Some(dwarf) => Ok(dwarf),
            None => {
                let dwarf = self.file.dwarf(true)?;
                Ok(self.with_locations.get_or_init(|| dwarf))
            }
        }
    }

    /// The unit with that number.
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
        self.info.budget.spend(text.len() / READ + 1).ok()?;
        Some(text)
    }
}
