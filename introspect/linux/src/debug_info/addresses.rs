//! From an address of the text to the line that its code was made of.
//!
//! What is kept true: an address is of the last row at or before it in its unit's table of lines, as long as
//! that row's sequence goes on; of nothing, if no unit says that its code is there.

use hvprobe_arch::Gva;

use super::error::DebugError;
use super::info::{DebugInfo, Unit};
use super::rows::path;

/// A line of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// The file's path, from where the kernel was built.
    pub file: String,
    /// Its number in the file, from 1.
    pub line: u64,
}

impl DebugInfo<'_> {
    /// The line that the instruction at `at`, as linked, was made of; of what was inlined there, the innermost
    /// function's. `None` where there is none, as in assembly without debug information.
    ///
    /// # Errors
    /// When the debug information is damaged.
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

/// File and line of the row that `at` is in.
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
