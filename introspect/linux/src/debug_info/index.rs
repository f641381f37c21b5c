//! Which units have what, so that a question takes those alone.
//!
//! ```text
//!   all units, once ──▶ the index ──▶ a file, for the next time ──▶ the index
//!                         │
//!                         ├── name of a function with code ──▶ units
//!                         ├── name of a source file ────────▶ units
//!                         └── address ──────────────────────▶ unit
//! ```
//! What is kept true: an index says where to look, and what is there is read as if nobody had said so. It is of the
//! one file whose build id and lengths it has, and its units share no bytes; every other number in it is checked
//! when it is used, so one that is wrong leads to nothing, or to an error.

use std::cmp::Ordering;
use std::ops::Range;

use prost::Message as _;
use prost::bytes::Buf;
use prost::encoding::{decode_varint, encode_varint};
use rustc_hash::FxHashMap;

use super::error::DebugError;

/// The way in which indexes are written, and what they hold.
pub(super) const VERSION: u32 = 1;
/// More units than a kernel has source files, with all its drivers.
pub(super) const MOST_UNITS: usize = 1 << 17;
/// More names than a kernel has, and more units that have them: one with all its drivers has half a million
/// functions, and some ten million times a file is used.
const MOST_NAMES: usize = 1 << 20;
const MOST_NAMED: usize = 1 << 24;
/// Bytes of all names.
const MOST_TEXT: usize = 64 << 20;

/// Where the units of a file are, and what they have.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Index {
    #[prost(message, required, tag = "1")]
    pub(super) of: Of,
    /// In their order.
    #[prost(message, repeated, tag = "2")]
    pub(super) units: Vec<UnitPlace>,
    /// Functions that have code there.
    #[prost(message, required, tag = "3")]
    pub(super) functions: Names,
    /// Source files, without their folders.
    #[prost(message, required, tag = "4")]
    pub(super) files: Names,
    /// Code, in the order of its addresses.
    #[prost(message, repeated, tag = "5")]
    pub(super) code: Vec<Code>,
}

/// The file that an index is of.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Of {
    #[prost(uint32, tag = "1")]
    pub(super) version: u32,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) build_id: Vec<u8>,
    /// The lengths of its sections.
    #[prost(uint64, repeated, tag = "3")]
    pub(super) lengths: Vec<u64>,
}

/// Where a unit is.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct UnitPlace {
    /// In `.debug_info`.
    #[prost(fixed64, tag = "1")]
    pub(super) start: u64,
    #[prost(fixed64, tag = "2")]
    pub(super) end: u64,
    /// Where its table is in `.debug_abbrev`.
    #[prost(fixed64, tag = "3")]
    pub(super) abbreviations: u64,
}

/// Names, in their order, each with units.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Names {
    #[prost(bytes = "vec", tag = "1")]
    texts: Vec<u8>,
    /// Where each ends in `texts`.
    #[prost(fixed32, repeated, tag = "2")]
    text_ends: Vec<u32>,
    /// Numbers, each as the distance from the one before.
    #[prost(bytes = "vec", tag = "3")]
    units: Vec<u8>,
    /// Where those of each end in `units`.
    #[prost(fixed32, repeated, tag = "4")]
    unit_ends: Vec<u32>,
}

/// A piece of code.
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
    /// The index in `bytes`, if it is in one piece and of the file that says that of itself, with so many bytes of
    /// `.debug_info`.
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

    /// What [`DebugFile::read_index`](super::DebugFile::read_index) reads.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    /// How many bytes those are.
    #[must_use]
    pub fn length(&self) -> usize {
        self.encoded_len()
    }

    pub(super) fn units(&self) -> &[UnitPlace] {
        &self.units
    }

    /// The units with code of functions called `name`, by their numbers.
    pub(super) fn units_with_function(&self, name: &str) -> Vec<usize> {
        self.functions.units(name.as_bytes())
    }

    /// The units with files that may be at `path`, of which the folders are not looked at.
    pub(super) fn units_with_file(&self, path: &str) -> Vec<usize> {
        let name = path.rsplit('/').next().unwrap_or_default();
        self.files.units(name.as_bytes())
    }

    /// The unit that the code at `at` is of.
    pub(super) fn unit_at(&self, at: u64) -> Option<usize> {
        let behind = self.code.partition_point(|code| code.start <= at);
        let code = self.code.get(behind.checked_sub(1)?)?;
        (at < code.end).then(|| usize::try_from(code.unit).ok())?
    }
}

/// Names with the units that have them.
#[derive(Default)]
pub(super) struct Gathered<'f> {
    units: FxHashMap<&'f [u8], Vec<u32>>,
    text: usize,
    named: usize,
}

impl<'f> Gathered<'f> {
    /// Adds that `unit` has `name`; units come in their order.
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

    /// The units that `name` has.
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

/// The part with that number of parts that end at `ends`.
fn part<'a>(all: &'a [u8], ends: &[u32], number: usize) -> Option<&'a [u8]> {
    let start = match number.checked_sub(1) {
        Some(before) => *ends.get(before)?,
        None => 0,
    };
    let end = *ends.get(number)?;
    all.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
}
