//! Lists the lines of a function on which probes can be placed.
//!
//! Invariant: a line is listed only if it has code, together with every address at which a probe on the line is
//! placed.

use std::collections::{BTreeMap, BTreeSet};

use hvprobe_arch::Gva;
use hvprobe_spec::line_range::LineRange;

use super::error::DebugError;
use super::info::DebugInfo;
use super::points::nearest;
use super::rows::path;

/// The lines of a function that have code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionLines {
    /// The name of the function in the sources.
    pub name: String,
    /// Path of the file that has the function, relative to the directory in which the kernel was built, if the file
    /// is below it.
    pub file: String,
    /// Number of the line in that file at which the function begins. This is line 0 of the function.
    pub first: u64,
    /// The lines that have code, in ascending order.
    pub lines: Vec<Line>,
}

/// A line of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Number of the line, counted from the function's first line, which has number 0.
    pub number: u64,
    /// Addresses (as linked) at which code of the line begins, in ascending order.
    pub places: Vec<Gva>,
}

impl DebugInfo<'_> {
    /// Returns the lines of each function called `name`. If `file` is given, only functions in files whose paths
    /// end with `file` count. There are several results if several places in the sources define a function of that
    /// name.
    ///
    /// # Errors
    /// If no such function has code, or the debug information is damaged.
    pub fn lines(&self, name: &str, file: Option<&str>) -> Result<Vec<FunctionLines>, DebugError> {
        self.budget.begin();
        let mut functions = BTreeMap::<_, BTreeMap<u64, BTreeSet<u64>>>::new();
        self.each_function(name, file, |found| {
            let first = found.function.line;
            let file = path(found.unit, found.function.file);
            let lines = functions.entry((file, first)).or_default();
            for (line, places) in found.lines()? {
                let known = lines.entry(line - first).or_default();
                known.extend(places.into_keys());
            }
            Ok(())
        })?;
        let functions = functions.into_iter().map(|((file, first), lines)| {
            let lines = lines.into_iter().map(|(number, places)| Line {
                number,
                places: places.into_iter().map(Gva).collect(),
            });
            FunctionLines {
                name: name.to_owned(),
                file,
                first,
                lines: lines.collect(),
            }
        });
        Ok(functions.collect())
    }

    /// Like [`DebugInfo::lines`], but returns only the lines in `range`.
    ///
    /// # Errors
    /// Those of [`DebugInfo::lines`], and an error if no line in the range has code.
    pub fn lines_within(&self, range: &LineRange) -> Result<Vec<FunctionLines>, DebugError> {
        let mut functions = self.lines(&range.function, range.file.as_deref())?;
        let lines = functions.iter().flat_map(|it| &it.lines);
        let all: BTreeSet<u64> = lines.map(|line| line.number).collect();
        let line = *range.lines.start();
        if !all.is_empty() && all.range(range.lines.clone()).next().is_none() {
            return Err(DebugError::NoLine {
                of: range.function.clone(),
                line,
                near: nearest(&all, line),
            });
        }
        for function in &mut functions {
            function.lines.retain(|it| range.lines.contains(&it.number));
        }
        Ok(functions)
    }
}
