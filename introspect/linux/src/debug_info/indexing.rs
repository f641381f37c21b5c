//! Builds the index: reads all units once.
//!
//! Invariant: building the index finds any damage in the units, so damage makes the first question fail, not some
//! later one. The bytes of the units are not kept.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gimli::{EndianSlice, LittleEndian, UnitType};

use super::error::{BuildId, DebugError};
use super::file::DebugFile;
use super::index::{Code, Gathered, Index, MOST_UNITS, Names, UnitPlace};
use super::info::DebugInfo;
use super::later::once;
use super::rows::file_names;
use super::scopes::Scopes;

impl DebugFile {
    /// Returns the index of units. Unless an index was [adopted](Self::adopt), the first call builds it from all
    /// units. Once building has begun, it is completed even if nobody waits for the index any more. Otherwise,
    /// callers that wait for less time than it takes would make it start over and over, and it would never be
    /// finished.
    ///
    /// # Errors
    /// If the debug information is damaged, or if nobody waits for the index at the time when building it would
    /// begin.
    pub fn index(&self) -> Result<&Arc<Index>, DebugError> {
        once(&self.index, || {
            if self.abandoned.load(Ordering::Relaxed) {
                return Err(DebugError::Abandoned);
            }
            build(self).map(Arc::new)
        })
    }
}

impl<'f> DebugInfo<'f> {
    /// Opens the debug information in `file` for the kernel or module whose build id is `build_id`.
    ///
    /// # Errors
    /// If the file is of another kernel, if either build id is missing, if the file has no debug information, or if
    /// its index cannot be built.
    pub fn new(file: &'f DebugFile, build_id: Option<&[u8]>) -> Result<Self, DebugError> {
        if file.build_id.is_none() || file.build_id.as_deref() != build_id {
            return Err(DebugError::OtherKernel {
                file: BuildId(file.build_id.clone()),
                kernel: BuildId(build_id.map(<[u8]>::to_vec)),
            });
        }
        if file.info.len == 0 {
            return Err(DebugError::None);
        }
        let index = file.index()?;
        Self::over(file, index.units(), Some(index), None)
    }
}

/// Builds the index from all units of `file`.
pub(super) fn build(file: &DebugFile) -> Result<Index, DebugError> {
    let read;
    let bytes = match file.info.read_already() {
        Some(bytes) => bytes,
        None => {
            read = file.whole_info()?;
            read.as_slice()
        }
    };
    let mut index = Index {
        of: file.identity(),
        units: units(bytes)?,
        ..Index::default()
    };
    let mut info = DebugInfo::over(file, &index.units, None, Some(bytes))?;
    info.budget.never_abandoned();
    info.budget.begin();
    let mut functions = Gathered::default();
    let mut files = Gathered::default();
    let mut code = Vec::new();
    for number in 0..index.units.len() {
        let unit = info.unit(number)?;
        let own = u32::try_from(number).map_err(|_| DebugError::TooMuch)?;
        let scopes = Scopes::read(&unit)?;
        for (scope, _) in scopes.with_code() {
            if let Some(function) = scopes.function(scope) {
                functions.add(function.name, own)?;
            }
        }
        for name in file_names(&unit)? {
            files.add(name, own)?;
        }
        let root = unit.entry(unit.own.header.root_offset())?;
        code.extend(unit.ranges(&root)?.into_iter().map(|range| Code {
            start: range.start,
            end: range.end,
            unit: own,
        }));
    }
    code.sort_by_key(|code| code.start);
    index.functions = Names::new(functions)?;
    index.files = Names::new(files)?;
    index.code = code;
    Ok(index)
}

/// Finds the units in `bytes`, which is all of `.debug_info`.
fn units(bytes: &[u8]) -> Result<Vec<UnitPlace>, DebugError> {
    let mut units = Vec::new();
    let mut headers = gimli::DebugInfo::from(EndianSlice::new(bytes, LittleEndian)).units();
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
            UnitType::Compilation | UnitType::Partial => units.push(UnitPlace {
                start: at as u64,
                end: end as u64,
                abbreviations: header.debug_abbrev_offset().0 as u64,
            }),
            UnitType::Skeleton(_) => return Err(DebugError::Split(at)),
            // Type units, or units that a linked file never has.
            _ => {}
        }
        at = end;
    }
    Ok(units)
}
