//! Reads the line table of a unit (which line an instruction belongs to) and the unit's list of files.
//!
//! Invariant: at the address of a row, code of its line begins. Rows that the compiler does not mark as the start
//! of a statement are skipped: they are not meant for breakpoints.

use std::collections::BTreeSet;

use super::error::DebugError;
use super::info::{Reader, Unit};

/// Maximum length of a path, in bytes; a longer one is cut off.
const LONGEST_PATH: usize = 4096;

/// An address at which code of a line begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) at: u64,
    pub(super) file: u64,
    pub(super) line: u64,
}

/// Returns the rows of a unit that `wanted` accepts.
pub(super) fn rows(
    unit: &Unit<'_, '_>,
    mut wanted: impl FnMut(&Row) -> bool,
) -> Result<Vec<Row>, DebugError> {
    let Some(program) = unit.own.line_program.clone() else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    let mut rows = program.rows();
    loop {
        let next = rows.next_row();
        let next = next.map_err(|source| unit.damaged(".debug_line", source))?;
        let Some((_, row)) = next else {
            return Ok(found);
        };
        unit.info.budget.spend(1)?;
        let Some(line) = row.line() else { continue };
        let row_here = Row {
            at: row.address(),
            file: row.file_index(),
            line: line.get(),
        };
        if row.is_stmt() && !row.end_sequence() && wanted(&row_here) {
            found.push(row_here);
        }
    }
}

/// Returns the path of file number `file` of a unit, relative to the directory in which the kernel was built, if
/// the file is below it. Empty if the unit has no such file.
pub(super) fn path(unit: &Unit<'_, '_>, file: u64) -> String {
    let header = unit
        .own
        .line_program
        .as_ref()
        .map(|program| program.header());
    let Some((header, entry)) = header.and_then(|header| Some((header, header.file(file)?))) else {
        return String::new();
    };
    let text = |value| unit.text(value).map(shown).unwrap_or_default();
    let name = text(entry.path_name());
    let folder = entry.directory(header).map(text).unwrap_or_default();
    let built = unit.own.comp_dir.map(|dir: Reader<'_>| shown(dir.slice()));
    let path = match name.starts_with('/') || folder.is_empty() {
        true => name,
        false => format!("{folder}/{name}"),
    };
    let built = built.filter(|built| !built.is_empty());
    let below = built.and_then(|built| {
        path.strip_prefix(&built)?
            .strip_prefix('/')
            .map(str::to_owned)
    });
    let path = below.unwrap_or(path);
    path.strip_prefix("./").map(str::to_owned).unwrap_or(path)
}

fn shown(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[..text.len().min(LONGEST_PATH)]).into_owned()
}

/// Returns whether `path` ends with `wanted`, comparing whole path components.
pub(super) fn ends_with(path: &str, wanted: &str) -> bool {
    let wanted = wanted.strip_prefix("./").unwrap_or(wanted);
    let rest = path.strip_suffix(wanted);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('/') || wanted.starts_with('/'))
}

/// Returns the names of a unit's files, without directories.
pub(super) fn file_names<'f>(unit: &Unit<'_, 'f>) -> Result<Vec<&'f [u8]>, DebugError> {
    let Some(program) = &unit.own.line_program else {
        return Ok(Vec::new());
    };
    let files = program.header().file_names();
    unit.info.budget.spend(files.len())?;
    let names = files.iter().filter_map(|file| unit.text(file.path_name()));
    let last = names.map(|name| {
        let name = name.get(..LONGEST_PATH).unwrap_or(name);
        let folders = name.iter().rposition(|byte| *byte == b'/');
        name.get(folders.map_or(0, |at| at + 1)..)
            .unwrap_or_default()
    });
    Ok(last.collect())
}

/// Returns the numbers of a unit's files whose paths end with `wanted`.
pub(super) fn files_named(unit: &Unit<'_, '_>, wanted: &str) -> Result<BTreeSet<u64>, DebugError> {
    let count = unit
        .own
        .line_program
        .as_ref()
        .map_or(0, |program| program.header().file_names().len());
    unit.info.budget.spend(count)?;
    // Files are numbered from 0 in DWARF 5, and from 1 in earlier versions.
    let numbers = 0..=u64::try_from(count).unwrap_or(u64::MAX);
    let is_wanted = |file: &u64| ends_with(&path(unit, *file), wanted);
    Ok(numbers.filter(is_wanted).collect())
}
