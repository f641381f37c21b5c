//! Finds all addresses in the text that a point in the sources stands for.
//!
//! Invariants: at each address, code of the point's line or function begins, unless the point is an offset or an
//! address itself. Each address is listed once, in ascending order. Units are parsed one at a time.

use std::collections::{BTreeMap, BTreeSet};

use gimli::UnitOffset;
use hvprobe_arch::Gva;
use hvprobe_spec::point::{At, Point};

use super::error::DebugError;
use super::info::{DebugInfo, Unit};
use super::rows::{ends_with, files_named, path, rows};
use super::scopes::{Function, Scope, Scopes};

/// Maximum number of other files that are suggested for a function that is not in the named file.
const MOST_NEAR: usize = 3;

/// An address that a point stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointPlace {
    /// The address, as linked.
    pub at: Gva,
    /// Name of the function that contains the address: the outermost one, into which others may be inlined. Empty
    /// if unknown, as in assembly.
    pub function: String,
    /// The inlined function to which the code belongs, if it belongs to one.
    pub inlined: Option<String>,
    pub(super) unit: usize,
    /// Debug-information entry of the innermost function that contains the point, as an offset in the unit. The
    /// function may be inlined.
    pub(super) scope: Option<UnitOffset>,
}

impl PointPlace {
    /// Creates the place of a symbol. No variables are known at such a place.
    #[must_use]
    pub fn of_symbol(at: Gva, name: &str) -> Self {
        Self {
            at,
            function: name.to_owned(),
            inlined: None,
            unit: 0,
            scope: None,
        }
    }
}

/// A function in a unit.
pub(super) struct Found<'a, 'f> {
    pub(super) unit: &'a Unit<'a, 'f>,
    pub(super) scopes: &'a Scopes<'f>,
    pub(super) function: Function<'f>,
    /// Numbers of the function's scopes that have code.
    pub(super) members: Vec<usize>,
}

/// Maps each line to the addresses at which its code begins, and each address to the number of its scope.
pub(super) type LinePlaces = BTreeMap<u64, BTreeMap<u64, usize>>;

impl<'f> DebugInfo<'f> {
    /// Returns the places that `point` stands for. `FUNC%return` stands for the function's start.
    ///
    /// # Errors
    /// If `point` stands for no place, or the debug information is damaged.
    pub fn places(&self, point: &Point) -> Result<Vec<PointPlace>, DebugError> {
        self.budget.begin();
        let mut places = match point {
            Point::Line { file, line } => self.of_source(file, *line)?,
            Point::Text { .. } => return Err(DebugError::Pattern),
            Point::Address(at) => vec![PointPlace::of_symbol(*at, "")],
            Point::Function { name, file, at } => self.of_function(name, file.as_deref(), at)?,
        };
        in_order(&mut places);
        Ok(places)
    }

    /// Returns the places of `lines` in files whose paths end with `file`; none if the lines have no code.
    ///
    /// # Errors
    /// If no unit has such a file, or the debug information is damaged.
    pub fn places_of_lines(
        &self,
        file: &str,
        lines: &BTreeSet<u64>,
    ) -> Result<Vec<PointPlace>, DebugError> {
        self.budget.begin();
        let (mut places, _) = self.of_lines(file, lines)?;
        in_order(&mut places);
        Ok(places)
    }

    /// Returns the paths of all source files that end with `file`, relative to the directory in which the kernel
    /// was built, if the files are below it.
    ///
    /// # Errors
    /// If there is no such file, or the debug information is damaged.
    pub fn files(&self, file: &str) -> Result<BTreeSet<String>, DebugError> {
        self.budget.begin();
        let mut paths = BTreeSet::new();
        for index in self.units_with_file(file) {
            let unit = self.unit(index)?;
            let files = files_named(&unit, file)?;
            paths.extend(files.into_iter().map(|file| path(&unit, file)));
        }
        match paths.is_empty() {
            true => Err(DebugError::NoFile(file.to_owned())),
            false => Ok(paths),
        }
    }

    /// Calls `each` for every function `name` that has code, unit by unit. If `file` is given, only functions in
    /// files whose paths end with `file` count.
    pub(super) fn each_function(
        &self,
        name: &str,
        file: Option<&str>,
        mut each: impl FnMut(&Found<'_, 'f>) -> Result<(), DebugError>,
    ) -> Result<(), DebugError> {
        let mut elsewhere = BTreeSet::new();
        let mut is_found = false;
        for index in self.units_with_function(name) {
            let unit = self.unit(index)?;
            let scopes = Scopes::read(&unit)?;
            // Keyed by the offset of the entry that describes the function.
            let mut members = BTreeMap::<usize, (Function<'f>, Vec<usize>)>::new();
            for (number, _) in scopes.with_code() {
                let function = scopes.function(number);
                if let Some(function) = function.filter(|it| it.name == name.as_bytes()) {
                    let entry = members.entry(function.root.0);
                    let (_, members) = entry.or_insert_with(|| (function, Vec::new()));
                    members.push(number);
                }
            }
            for (function, members) in members.into_values() {
                let at = path(&unit, function.file);
                if file.is_some_and(|wanted| !ends_with(&at, wanted)) {
                    elsewhere.insert(at);
                    continue;
                }
                is_found = true;
                each(&Found {
                    unit: &unit,
                    scopes: &scopes,
                    function,
                    members,
                })?;
            }
        }
        if is_found {
            return Ok(());
        }
        let near = elsewhere.into_iter().take(MOST_NEAR);
        let near = near.map(|file| format!("{name}@{file}"));
        Err(DebugError::NoFunction {
            name: match file {
                Some(file) => format!("{name}@{file}"),
                None => name.to_owned(),
            },
            near: near.collect(),
        })
    }

    fn of_function(
        &self,
        name: &str,
        file: Option<&str>,
        at: &At,
    ) -> Result<Vec<PointPlace>, DebugError> {
        let mut places = Vec::new();
        let mut lines = BTreeSet::new();
        let mut size = None;
        self.each_function(name, file, |found| {
            let scopes = found.members.iter().filter_map(|number| {
                let scope = found.scopes.list.get(*number)?;
                Some((*number, scope, scope.entry()?))
            });
            match at {
                At::Entry => {
                    let scopes = scopes.filter(|(_, scope, _)| !found.is_part(scope));
                    places.extend(scopes.map(|(number, _, at)| found.place(at, number)));
                }
                At::Return | At::Offset(_) => {
                    let offset = match at {
                        At::Offset(offset) => *offset,
                        _ => 0,
                    };
                    for (number, scope, at) in scopes.filter(|(_, scope, _)| !scope.is_inlined) {
                        let bytes = scope.ranges.iter().map(|range| range.end - range.start);
                        size = size.max(bytes.max());
                        let at = at.checked_add(offset).filter(|at| scope.contains(*at));
                        places.extend(at.map(|at| found.place(at, number)));
                    }
                }
                At::Line(line) => {
                    let first = found.function.line;
                    let all = found.lines()?;
                    lines.extend(all.keys().map(|line| line - first));
                    let wanted = first.checked_add(*line).and_then(|line| all.get(&line));
                    let wanted = wanted.into_iter().flatten();
                    places.extend(wanted.map(|(at, number)| found.place(*at, *number)));
                }
                At::Text(_) => return Err(DebugError::Pattern),
            }
            Ok(())
        })?;
        if !places.is_empty() {
            return Ok(places);
        }
        let name = name.to_owned();
        Err(match (at, size) {
            (At::Line(line), _) => DebugError::NoLine {
                of: name,
                line: *line,
                near: nearest(&lines, *line),
            },
            (At::Offset(_), Some(size)) => DebugError::Offset { name, size },
            (At::Return, _) => DebugError::OnlyInlined(name, "return to follow"),
            _ => DebugError::OnlyInlined(name, "offsets"),
        })
    }

    fn of_source(&self, file: &str, line: u64) -> Result<Vec<PointPlace>, DebugError> {
        let (places, lines) = self.of_lines(file, &BTreeSet::from([line]))?;
        match places.is_empty() {
            false => Ok(places),
            true => Err(DebugError::NoLine {
                of: file.to_owned(),
                line,
                near: nearest(&lines, line),
            }),
        }
    }

    /// Returns the places of the `wanted` lines of a file, and the numbers of all lines of the file that have code.
    fn of_lines(
        &self,
        file: &str,
        wanted: &BTreeSet<u64>,
    ) -> Result<(Vec<PointPlace>, BTreeSet<u64>), DebugError> {
        let mut places = Vec::new();
        let mut lines = BTreeSet::new();
        let mut is_known = false;
        for index in self.units_with_file(file) {
            let unit = self.unit(index)?;
            let files = files_named(&unit, file)?;
            if files.is_empty() {
                continue;
            }
            is_known = true;
            let all = rows(&unit, |row| files.contains(&row.file))?;
            lines.extend(all.iter().map(|row| row.line));
            let here = all.iter().filter(|row| wanted.contains(&row.line));
            let is_own = unit
                .own
                .name
                .is_some_and(|name| ends_with(&String::from_utf8_lossy(name.slice()), file));
            // Skips most units: they use the file, but have no code of these lines.
            if here.clone().next().is_none() && !is_own {
                continue;
            }
            let scopes = Scopes::read(&unit)?;
            for row in here {
                let scope = scopes.of_line(self, row.at, row.file, row.line)?;
                places.push(place(&scopes, index, row.at, scope));
            }
            for (number, at) in scopes.with_code() {
                let begins = scopes.function(number).map(|it| (it.file, it.line));
                let is_here =
                    |place: (u64, u64)| files.contains(&place.0) && wanted.contains(&place.1);
                if begins.is_some_and(is_here) {
                    places.push(place(&scopes, index, at, Some(number)));
                }
                let scope = scopes.list.get(number);
                if let Some(scope) = scope.filter(|it| it.call.is_some_and(is_here)) {
                    places.push(place(&scopes, index, at, scope.parent));
                }
            }
        }
        match is_known {
            true => Ok((places, lines)),
            false => Err(DebugError::NoFile(file.to_owned())),
        }
    }
}

impl<'f> Found<'_, 'f> {
    /// Returns the lines of the function, with the addresses at which their code begins. The lines are those of the
    /// rows in the line table, those at which other functions were inlined, and the function's first line.
    pub(super) fn lines(&self) -> Result<LinePlaces, DebugError> {
        let function = self.function;
        let mut lines = LinePlaces::new();
        let mut add = |line, at, scope| {
            let places: &mut BTreeMap<_, _> = lines.entry(line).or_default();
            places.entry(at).or_insert(scope);
        };
        let mut ranges = Vec::new();
        for number in &self.members {
            let Some(scope) = self.scopes.list.get(*number) else {
                continue;
            };
            if let Some(at) = scope.entry().filter(|_| !self.is_part(scope)) {
                add(function.line, at, *number);
            }
            ranges.extend(scope.ranges.iter().map(|range| (range.start, range.end)));
        }
        let is_own = |scope: usize| {
            let other = self.scopes.function(scope);
            other.is_some_and(|other| other.root == function.root)
        };
        for (number, scope) in self.scopes.list.iter().enumerate() {
            // Skips the function's own parts. If the function has only one line, its calls of others are on its
            // first line, so `is_part` alone would also skip these.
            if is_own(number) && self.is_part(scope) {
                continue;
            }
            let Some((file, line)) = scope.call else {
                continue;
            };
            let caller = scope.parent.filter(|parent| is_own(*parent));
            if let (Some(caller), Some(at)) = (caller, scope.entry())
                && file == function.file
                && line >= function.line
            {
                add(line, at, caller);
            }
        }
        let ranges = merged(ranges);
        let mut found = rows(self.unit, |row| {
            let next = ranges.partition_point(|(start, _)| *start <= row.at);
            let range = next.checked_sub(1).and_then(|last| ranges.get(last));
            row.file == function.file
                && row.line >= function.line
                && range.is_some_and(|(_, end)| row.at < *end)
        })?;
        found.dedup();
        for row in found {
            let scope = self
                .scopes
                .of_line(self.unit.info, row.at, row.file, row.line)?;
            if let Some(scope) = scope.filter(|scope| is_own(*scope)) {
                add(row.line, row.at, scope);
            }
        }
        Ok(lines)
    }

    /// Returns whether `scope` is a part of the function that the compiler split off and inlined again. The call
    /// site of such a part is the function's own first line, although nothing calls the function there.
    fn is_part(&self, scope: &Scope<'_>) -> bool {
        scope.call == Some((self.function.file, self.function.line))
    }

    fn place(&self, at: u64, scope: usize) -> PointPlace {
        place(self.scopes, self.unit.index, at, Some(scope))
    }
}

/// Sorts places by address and removes duplicates.
fn in_order(places: &mut Vec<PointPlace>) {
    places.sort_by_key(|place| place.at);
    places.dedup_by_key(|place| place.at);
}

/// Sorts ranges and merges those that overlap or touch.
fn merged(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match merged.last_mut() {
            Some((_, last)) if start <= *last => *last = end.max(*last),
            _ => merged.push((start, end)),
        }
    }
    merged
}

fn place(scopes: &Scopes<'_>, unit: usize, at: u64, scope: Option<usize>) -> PointPlace {
    let name = |scope: usize| {
        let name = scopes.function(scope).map(|it| it.name);
        String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
    };
    let number = scope;
    let scope = number.and_then(|number| scopes.list.get(number));
    let inlined = number.filter(|_| scope.is_some_and(|scope| scope.is_inlined));
    PointPlace {
        at: Gva(at),
        function: number
            .map(|it| name(scopes.outermost(it)))
            .unwrap_or_default(),
        inlined: inlined.map(name),
        unit,
        scope: scope.map(|scope| scope.at),
    }
}

/// Returns the last of `lines` before `line`, and the first at or after it, as texts for a message.
pub(super) fn nearest(lines: &BTreeSet<u64>, line: u64) -> Vec<String> {
    let before = lines.range(..line).next_back();
    let behind = lines.range(line..).next();
    let near = before.into_iter().chain(behind);
    near.map(|line| format!("line {line}")).collect()
}
