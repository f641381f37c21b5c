//! The functions of a unit: their own code, and the places at which they were inlined.
//!
//! Invariants: a scope's parent precedes it in the list, so walking outwards ends. Code ranges come from the
//! scope's own entry. The name may come from another entry of the same unit, at most a few steps away. Therefore, a
//! function that link-time optimisation inlined from another unit has no name.

use std::ops::Range;

use gimli::{AttributeValue, DwTag, UnitOffset, constants as dw};
use rustc_hash::FxHashMap;

use super::error::DebugError;
use super::info::{DebugInfo, Entry, Unit, Value};

/// Maximum number of steps from a scope to the entry with its name.
const MOST_STEPS: usize = 8;
/// Maximum number of scopes in a unit; none has more, even with everything inlined into its functions.
const MOST_SCOPES: usize = 1 << 20;

/// A function, or an inlined copy of one.
#[derive(Debug)]
pub(super) struct Scope<'f> {
    pub(super) at: UnitOffset,
    /// The number of the enclosing scope.
    pub(super) parent: Option<usize>,
    /// Whether this is a copy inlined into another function.
    pub(super) is_inlined: bool,
    /// Entry that has the attributes missing here, as an offset in the unit.
    origin: Option<usize>,
    name: Option<&'f [u8]>,
    file: Option<u64>,
    line: Option<u64>,
    /// File and line of the call that the inlined code replaces.
    pub(super) call: Option<(u64, u64)>,
    /// Addresses of the code.
    pub(super) ranges: Vec<Range<u64>>,
    entry: Option<u64>,
}

impl Scope<'_> {
    /// Returns the address at which the code begins. For an inlined function that left no instruction, returns the
    /// address at which its code would begin.
    pub(super) fn entry(&self) -> Option<u64> {
        self.entry.or(self.ranges.first().map(|range| range.start))
    }

    pub(super) fn contains(&self, at: u64) -> bool {
        self.ranges.iter().any(|range| range.contains(&at))
    }
}

/// The function to which the code of a scope belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function<'f> {
    /// Offset of the entry that describes the function. It is the same for all scopes of the function.
    pub(super) root: UnitOffset,
    pub(super) name: &'f [u8],
    /// Number of the file in which the function is declared.
    pub(super) file: u64,
    /// Number of the line at which the function begins.
    pub(super) line: u64,
}

/// All scopes of a unit.
#[derive(Debug)]
pub(super) struct Scopes<'f> {
    pub(super) list: Vec<Scope<'f>>,
    functions: Vec<Option<Function<'f>>>,
}

impl<'f> Scopes<'f> {
    pub(super) fn read(unit: &Unit<'_, 'f>) -> Result<Self, DebugError> {
        let budget = &unit.info.budget;
        let wrong = |source| unit.damaged(".debug_info", source);
        let mut list = Vec::new();
        let mut by_offset = FxHashMap::default();
        // Depth and number of each scope that encloses the current entry.
        let mut around: Vec<(isize, usize)> = Vec::new();
        let mut entries = unit.own.entries_raw(None).map_err(wrong)?;
        let mut entry = Entry::null();
        while !entries.is_empty() {
            let (at, depth) = (entries.next_offset(), entries.next_depth());
            let abbreviation = entries.read_abbreviation().map_err(wrong)?;
            let Some(abbreviation) = abbreviation else {
                budget.spend(1)?;
                continue;
            };
            while around.pop_if(|(outer, _)| *outer >= depth).is_some() {}
            let attributes = abbreviation.attributes();
            budget.spend(attributes.len() + 1)?;
            if !is_scope(abbreviation.tag()) {
                entries.skip_attributes(attributes).map_err(wrong)?;
                continue;
            }
            drop(entry);
            entry = unit.entry(at)?;
            entries.skip_attributes(attributes).map_err(wrong)?;
            if list.len() == MOST_SCOPES {
                return Err(DebugError::TooMuch);
            }
            let mut scope = scope(unit, &entry)?;
            scope.parent = around.last().map(|(_, outer)| *outer);
            by_offset.insert(at.0, list.len());
            around.push((depth, list.len()));
            list.push(scope);
        }
        let functions = (0..list.len())
            .map(|scope| function(&list, &by_offset, scope))
            .collect();
        Ok(Self { list, functions })
    }

    /// Returns the function to which the code of scope number `scope` belongs, if it is described.
    pub(super) fn function(&self, scope: usize) -> Option<Function<'f>> {
        self.functions.get(scope).copied().flatten()
    }

    /// Returns the numbers of the scopes that have code, each with the address at which the code begins.
    pub(super) fn with_code(&self) -> impl Iterator<Item = (usize, u64)> {
        let all = self.list.iter().enumerate();
        all.filter_map(|(number, scope)| Some((number, scope.entry()?)))
    }

    /// Returns the scopes with code at `at`, each with its number.
    fn at(&self, at: u64) -> impl Iterator<Item = (usize, &Scope<'f>)> {
        let all = self.list.iter().enumerate();
        all.filter(move |(_, scope)| scope.contains(at))
    }

    /// Returns the number of the scope to which the code of line `line` at `at` belongs. Among the scopes at `at`
    /// whose functions begin in `file` and not after the line, this is the one whose function begins last. If there
    /// is none, as for a macro from another file, it is the innermost scope at `at`.
    pub(super) fn of_line(
        &self,
        info: &DebugInfo<'f>,
        at: u64,
        file: u64,
        line: u64,
    ) -> Result<Option<usize>, DebugError> {
        info.budget.spend(self.list.len() / 4 + 1)?;
        let fits = |scope: usize| {
            let function = self.function(scope)?;
            let fits = function.file == file && function.line <= line;
            // Breaks the tie between two scopes of a function that is inlined into itself: the inner one has the
            // higher number.
            fits.then_some((function.line, scope))
        };
        let best = self.at(at).filter_map(|(scope, _)| fits(scope)).max();
        let inner = self.at(at).last().map(|(scope, _)| scope);
        Ok(best.map(|(_, scope)| scope).or(inner))
    }

    /// Returns the number of the outermost scope around `scope`: a function that is not inlined.
    pub(super) fn outermost(&self, mut scope: usize) -> usize {
        while let Some(parent) = self.list.get(scope).and_then(|scope| scope.parent) {
            scope = parent;
        }
        scope
    }
}

fn is_scope(tag: DwTag) -> bool {
    tag == dw::DW_TAG_subprogram || tag == dw::DW_TAG_inlined_subroutine
}

fn scope<'f>(unit: &Unit<'_, 'f>, entry: &Entry<'f>) -> Result<Scope<'f>, DebugError> {
    let number = |name| entry.attr(name).and_then(gimli::Attribute::udata_value);
    let origin = [dw::DW_AT_abstract_origin, dw::DW_AT_specification];
    let origin = origin.into_iter().find_map(|name| entry.attr_value(name));
    let file_number = |name| match entry.attr_value(name) {
        Some(AttributeValue::FileIndex(file)) => Some(file),
        _ => number(name),
    };
    let call = file_number(dw::DW_AT_call_file).zip(number(dw::DW_AT_call_line));
    let ranges = unit.ranges(entry)?;
    let first = ranges.first().map(|range| range.start);
    let begins = match entry.attr_value(dw::DW_AT_entry_pc) {
        Some(value @ (AttributeValue::Addr(_) | AttributeValue::DebugAddrIndex(_))) => {
            unit.address(value)
        }
        // An offset from the start of the code.
        Some(value) => value.udata_value().and_then(|at| first?.checked_add(at)),
        None => None,
    };
    Ok(Scope {
        at: entry.offset(),
        parent: None,
        is_inlined: entry.tag() == dw::DW_TAG_inlined_subroutine,
        origin: match origin {
            Some(AttributeValue::UnitRef(at)) => Some(at.0),
            _ => None,
        },
        name: entry
            .attr_value(dw::DW_AT_name)
            .and_then(|value| unit.text(value)),
        file: file_number(dw::DW_AT_decl_file),
        line: number(dw::DW_AT_decl_line),
        call,
        entry: begins.filter(|at| *at != 0),
        ranges,
    })
}

impl<'f> Unit<'_, 'f> {
    /// Returns the address ranges of an entry's code.
    pub(super) fn ranges(&self, entry: &Entry<'f>) -> Result<Vec<Range<u64>>, DebugError> {
        let wrong = |source| self.damaged(".debug_rnglists", source);
        let mut found = Vec::new();
        let mut add = |start: u64, end: u64| {
            // Code that the linker discarded is at 0.
            if start != 0 && start < end {
                found.push(start..end);
            }
        };
        if let Some(value) = entry.attr_value(dw::DW_AT_ranges) {
            let list = self.info.dwarf.attr_ranges(&self.own, value);
            if let Some(mut list) = list.map_err(wrong)? {
                while let Some(range) = list.next().map_err(wrong)? {
                    self.info.budget.spend(1)?;
                    add(range.begin, range.end);
                }
            }
            return Ok(found);
        }
        let address = |name| self.address(entry.attr_value(name)?);
        if let Some(start) = address(dw::DW_AT_low_pc) {
            let size = entry.attr_value(dw::DW_AT_high_pc);
            let size = size.and_then(|value| value.udata_value());
            let end = size.map(|size| start.saturating_add(size));
            let end = end.or_else(|| address(dw::DW_AT_high_pc));
            add(start, end.unwrap_or(0));
        }
        Ok(found)
    }

    /// Returns the address that an attribute refers to; `None` if it does not refer to one.
    fn address(&self, value: Value<'f>) -> Option<u64> {
        self.info.dwarf.attr_address(&self.own, value).ok()?
    }
}

/// Returns the function to which the code of scope number `scope` belongs. Attributes that its entry lacks are
/// taken from the entries in which the scope originates.
fn function<'f>(
    list: &[Scope<'f>],
    by_offset: &FxHashMap<usize, usize>,
    scope: usize,
) -> Option<Function<'f>> {
    let mut scope = list.get(scope)?;
    let (mut name, mut file, mut line) = (scope.name, scope.file, scope.line);
    for _ in 0..MOST_STEPS {
        let Some(next) = scope.origin.and_then(|at| by_offset.get(&at)) else {
            break;
        };
        scope = list.get(*next)?;
        name = name.or(scope.name);
        file = file.or(scope.file);
        line = line.or(scope.line);
    }
    Some(Function {
        root: scope.at,
        name: name?,
        file: file?,
        line: line?,
    })
}
