//! Maps names and addresses to units, so that a question reads only the units it needs.
//!
//! ```text
//!   all units, once ──▶ the index ──▶ a file, for the next time ──▶ the index
//!                         │
//!                         ├── name of a function with code ──▶ units
//!                         ├── name of a source file ────────▶ units
//!                         └── address ──────────────────────▶ unit
//! ```
//! Invariants: an index only says in which units to search. These units are then read and checked as they would be
//! without an index. An index belongs to the one file whose build id and section lengths it records, and its units
//! share no bytes. Every other number in an index is checked when it is used: a wrong number leads to an empty
//! answer, or to an error.

use std::cmp::Ordering;
use std::ops::Range;

use prost::Message as _;
use prost::bytes::Buf;
use prost::encoding::{decode_varint, encode_varint};
use rustc_hash::FxHashMap;

use super::error::DebugError;

/// Version of the index format and of its contents.
pub(super) const VERSION: u32 = 1;
/// Maximum number of units: more than a kernel with all its drivers has source files.
pub(super) const MOST_UNITS: usize = 1 << 17;
/// Maximum number of different names. A kernel with all its drivers has half a million functions.
const MOST_NAMES: usize = 1 << 20;
/// Maximum number of pairs of a name and a unit. A kernel with all its drivers uses source files some ten million
/// times.
const MOST_NAMED: usize = 1 << 24;
/// Maximum length of all names together, in bytes.
const MOST_TEXT: usize = 64 << 20;

/// The units of a file, and the functions, source files and code in each.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Index {
    #[prost(message, required, tag = "1")]
    pub(super) of: Of,
    /// The units, ordered by their offsets in `.debug_info`.
    #[prost(message, repeated, tag = "2")]
    pub(super) units: Vec<UnitPlace>,
    /// The names of functions, each with the units in which the function has code.
    #[prost(message, required, tag = "3")]
    pub(super) functions: Names,
    /// The names of source files, without directories, each with the units that use the file.
    #[prost(message, required, tag = "4")]
    pub(super) files: Names,
    /// Ranges of code, ordered by address.
    #[prost(message, repeated, tag = "5")]
    pub(super) code: Vec<Code>,
}

/// Identity of the file to which an index belongs.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Of {
    #[prost(uint32, tag = "1")]
    pub(super) version: u32,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) build_id: Vec<u8>,
    /// The lengths of the file's sections.
    #[prost(uint64, repeated, tag = "3")]
    pub(super) lengths: Vec<u64>,
}

/// Position of a unit.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct UnitPlace {
    /// Offset in `.debug_info` at which the unit begins.
    #[prost(fixed64, tag = "1")]
    pub(super) start: u64,
    #[prost(fixed64, tag = "2")]
    pub(super) end: u64,
    /// Offset in `.debug_abbrev` of the unit's abbreviation table.
    #[prost(fixed64, tag = "3")]
    pub(super) abbreviations: u64,
}

/// Sorted names, each with the numbers of the units that have it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Names {
    #[prost(bytes = "vec", tag = "1")]
    texts: Vec<u8>,
    /// Offset in `texts` at which each name ends.
    #[prost(fixed32, repeated, tag = "2")]
    text_ends: Vec<u32>,
    /// For each name, the numbers of its units as varints: the first number, and then the distance from each to the
    /// next.
    #[prost(bytes = "vec", tag = "3")]
    units: Vec<u8>,
    /// Offset in `units` at which the numbers of each name end.
    #[prost(fixed32, repeated, tag = "4")]
    unit_ends: Vec<u32>,
}

/// A range of code, and the number of its unit.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct Code {
    #[prost(fixed64, tag = "1")]
    pub(super) start: u64,
    #[prost(fixed64, tag = "2")]
    pub(super) end: u64,
    #[prost(uint32, tag = "3")]
    pub(super) unit: u32,
}

impl UnitPlace {
    pub(super) fn range(&self) -> Range<usize> {
        let number = |at| usize::try_from(at).unwrap_or(usize::MAX);
        number(self.start)..number(self.end)
    }

    pub(super) fn abbreviations(&self) -> usize {
        usize::try_from(self.abbreviations).unwrap_or(usize::MAX)
    }
}

impl Index {
    /// Parses the index in `bytes`. `None` if it is damaged, its identity is not `of`, or its units do not fit
    /// into `length` bytes of `.debug_info`.
    pub(super) fn parse(bytes: &[u8], of: &Of, length: usize) -> Option<Self> {
        let index = Self::decode(bytes).ok()?;
        let mut end = 0;
        let units = index.units.iter();
        let is_sound = units.len() <= MOST_UNITS
            && units.map(UnitPlace::range).all(|unit| {
                let is_behind = end <= unit.start && unit.start < unit.end;
                end = unit.end;
                is_behind
            });
        (is_sound && end <= length && index.of == *of).then_some(index)
    }

    /// Encodes the index into the bytes that [`DebugFile::read_index`](super::DebugFile::read_index) parses.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    /// Returns the number of bytes that [`Index::to_bytes`] returns.
    #[must_use]
    pub fn length(&self) -> usize {
        self.encoded_len()
    }

    pub(super) fn units(&self) -> &[UnitPlace] {
        &self.units
    }

    /// Returns the numbers of the units that have code of a function called `name`.
    pub(super) fn units_with_function(&self, name: &str) -> Vec<usize> {
        self.functions.units(name.as_bytes())
    }

    /// Returns the numbers of the units that use a file with the same name as the file at `path`. Directories are
    /// not compared.
    pub(super) fn units_with_file(&self, path: &str) -> Vec<usize> {
        let name = path.rsplit('/').next().unwrap_or_default();
        self.files.units(name.as_bytes())
    }

    /// Returns the number of the unit whose code covers `at`.
    pub(super) fn unit_at(&self, at: u64) -> Option<usize> {
        let behind = self.code.partition_point(|code| code.start <= at);
        let code = self.code.get(behind.checked_sub(1)?)?;
        (at < code.end).then(|| usize::try_from(code.unit).ok())?
    }
}

/// Names and their units, collected before they are sorted.
#[derive(Default)]
pub(super) struct Gathered<'f> {
    units: FxHashMap<&'f [u8], Vec<u32>>,
    text: usize,
    named: usize,
}

impl<'f> Gathered<'f> {
    /// Records that `unit` has `name`. Units must come in ascending order.
    pub(super) fn add(&mut self, name: &'f [u8], unit: u32) -> Result<(), DebugError> {
        let units = self.units.entry(name).or_default();
        if units.is_empty() {
            self.text = self.text.saturating_add(name.len());
        }
        if units.last() != Some(&unit) {
            units.push(unit);
            self.named += 1;
        }
        let is_too_much =
            self.text > MOST_TEXT || self.named > MOST_NAMED || self.units.len() > MOST_NAMES;
        if is_too_much {
            Err(DebugError::TooMuch)
        } else {
            Ok(())
        }
    }
}

impl Names {
    pub(super) fn new(names: Gathered<'_>) -> Result<Self, DebugError> {
        let mut names: Vec<_> = names.units.into_iter().collect();
        names.sort_unstable();
        let mut all = Self::default();
        let end = |of: &[u8]| u32::try_from(of.len()).map_err(|_| DebugError::TooMuch);
        for (name, units) in names {
            all.texts.extend_from_slice(name);
            all.text_ends.push(end(&all.texts)?);
            let mut last = 0;
            for unit in units {
                encode_varint(u64::from(unit - last), &mut all.units);
                last = unit;
            }
            all.unit_ends.push(end(&all.units)?);
        }
        Ok(all)
    }

    /// Returns the numbers of the units that have `name`.
    fn units(&self, name: &[u8]) -> Vec<usize> {
        let found = self
            .find(name)
            .and_then(|at| part(&self.units, &self.unit_ends, at));
        let mut rest = found.unwrap_or_default();
        let mut units = Vec::new();
        let mut last = 0_u64;
        while rest.has_remaining()
            && let Ok(step) = decode_varint(&mut rest)
        {
            last = last.saturating_add(step);
            units.extend(usize::try_from(last));
        }
        units
    }

    fn find(&self, name: &[u8]) -> Option<usize> {
        let (mut low, mut high) = (0, self.text_ends.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match part(&self.texts, &self.text_ends, middle)?.cmp(name) {
                Ordering::Less => low = middle + 1,
                Ordering::Equal => return Some(middle),
                Ordering::Greater => high = middle,
            }
        }
        None
    }
}

/// Returns part number `number` of `all`; `ends` are the offsets at which the parts end.
fn part<'a>(all: &'a [u8], ends: &[u32], number: usize) -> Option<&'a [u8]> {
    let start = match number.checked_sub(1) {
        Some(before) => *ends.get(before)?,
        None => 0,
    };
    let end = *ends.get(number)?;
    all.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
}
