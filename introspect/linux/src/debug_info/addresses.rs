//! Finds the source line of an address in the text.
//!
//! Invariant: an address belongs to the row of its unit's line table that begins at or before it, if the next row
//! of the same sequence begins after it. An address that no unit covers has no line.

use hvprobe_arch::Gva;

use super::error::DebugError;
use super::info::{DebugInfo, Unit};
use super::rows::path;

/// A line of a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// Path of the file, relative to the directory in which the kernel was built, if the file is below it.
    pub file: String,
    /// Number of the line in the file, from 1.
    pub line: u64,
}

impl DebugInfo<'_> {
    /// Returns the source line of the instruction at `at` (the address as linked). For inlined code, that is the
    /// line in the innermost inlined function. `None` where there is no line, as in assembly without debug
    /// information.
    ///
    /// # Errors
    /// If the debug information is damaged.
    pub fn line_at(&self, at: Gva) -> Result<Option<SourceLine>, DebugError> {
        self.budget.begin();
        let Some(index) = self.unit_at(at.0) else {
            return Ok(None);
        };
        let unit = self.unit(index)?;
        let found = row_at(&unit, at.0)?;
        Ok(found.map(|(file, line)| SourceLine {
            file: path(&unit, file),
            line,
        }))
    }
}

/// Returns the file number and the line number of the row that covers `at`.
fn row_at(unit: &Unit<'_, '_>, at: u64) -> Result<Option<(u64, u64)>, DebugError> {
    let Some(program) = unit.own.line_program.clone() else {
        return Ok(None);
    };
    let mut rows = program.rows();
    let mut last: Option<(u64, Option<(u64, u64)>)> = None;
    loop {
        let next = rows.next_row();
        let next = next.map_err(|source| unit.damaged(".debug_line", source))?;
        let Some((_, row)) = next else {
            return Ok(None);
        };
        unit.info.budget.spend(1)?;
        if let Some((begins, found)) = last
            && (begins..row.address()).contains(&at)
        {
            return Ok(found);
        }
        let line = row.line().map(|line| (row.file_index(), line.get()));
        last = (!row.end_sequence()).then(|| (row.address(), line));
    }
}
