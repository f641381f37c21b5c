//! Converts a probe in the syntax of `perf probe` to definitions, one for each place that it stands for.
//!
//! Invariant: a definition names a symbol whose name is unique in the kernel or module, and fetches variables from
//! where the debug information places them at that one address. Parts of the request that are left out are
//! reported.

mod source_text;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;

use hvprobe_linux::debug_info::{
    DebugError, DebugInfo, Line, Location, PointPlace, Selected, Shown, Variable,
};
use hvprobe_spec::Column;
use hvprobe_spec::ParseError;
use hvprobe_spec::definition::is_event_name;
use hvprobe_spec::fetch::{ARRAY_MAX, Element, Shown as Digits, TypeName};
use hvprobe_spec::perf_probe::{PerfArgument, PerfProbe, PerfValue, Step};
use hvprobe_spec::point::{At, Point};

use self::source_text::{Pattern, Source};
use super::sources::{OF_MODULE, Sources, SourcesError};

const NO_SOURCE: &str = "a text is looked for in the sources: give --source";
/// Maximum number of functions that a pattern may match, and of places that a probe may have: perf's default
/// (`MAX_PROBES` in tools/perf/util/probe-finder.h).
const MOST_FUNCTIONS: usize = 128;

/// Definitions of a probe in perf's syntax.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Definitions {
    /// One definition for each place, in the order of addresses. For a pattern, this is the order within each
    /// function; functions are in the order of their names.
    pub lines: Vec<String>,
    /// What was left out, and why: places, or variables of `$vars` and `$params`.
    pub left_out: Vec<String>,
}

/// Names of events that are in use.
#[derive(Debug, Default)]
struct Names {
    taken: BTreeSet<String>,
    /// For each base name, the number to try next: all smaller ones are taken.
    next: BTreeMap<String, usize>,
}

impl Names {
    /// Reserves and returns the name `first` if it is free, otherwise `base` with a number.
    fn take(&mut self, first: String, base: &str) -> String {
        let mut name = first;
        let next = self.next.entry(base.to_owned()).or_insert(1);
        while !is_event_name(&name) || self.taken.contains(&name) {
            name = format!("{base}_{next}");
            if !is_event_name(&name) {
                // The name is too long, and would be with any other number.
                name = format!("probe_{}", self.taken.len());
                break;
            }
            *next += 1;
        }
        self.taken.insert(name.clone());
        name
    }
}

/// Definitions that are being made.
#[derive(Debug, Default)]
struct Making {
    made: Definitions,
    events: Names,
    /// Reason for the first place or function that was left out.
    refused: Option<ParseError>,
}

impl Making {
    /// Records that `what` is left out.
    fn leave_out(&mut self, what: &str, why: ParseError) {
        self.made.left_out.push(format!("{what}: {why}"));
        self.refused.get_or_insert(why);
    }

    /// Returns the definitions. If there are none, fails with the reason for the first place that was left out.
    fn finish(self) -> Result<Definitions, SourcesError> {
        match self.refused {
            Some(why) if self.made.lines.is_empty() => Err(SourcesError::Definition(why)),
            _ => Ok(self.made),
        }
    }
}

impl Sources {
    /// Makes definitions for the places that `probe` stands for. `source` is the folder of the kernel's
    /// sources, if there is one.
    ///
    /// # Errors
    /// When there is no such place, when none of the places has all arguments, or when the debug information is
    /// damaged.
    pub fn definitions(
        &self,
        probe: &PerfProbe,
        source: Option<&Path>,
    ) -> Result<Definitions, SourcesError> {
        let info = self.info()?;
        let mut making = Making::default();
        let (Some(pattern), Point::Function { file, at, .. }) =
            (probe.point.pattern(), &probe.point)
        else {
            let places = self.places(&info, probe, source)?;
            few(probe, places.len())?;
            self.of_places(&info, probe, &places, &mut making)?;
            return making.finish();
        };
        let functions: BTreeSet<&str> = self.matching(pattern).collect();
        let column = probe.column.0;
        match functions.len() {
            0 => return Err(refused(column, format!("no function matches `{pattern}`"))),
            1..=MOST_FUNCTIONS => {}
            many => {
                let message = format!(
                    "`{pattern}` matches {many} functions; at most {MOST_FUNCTIONS} are possible here"
                );
                return Err(refused(column, message));
            }
        }
        let mut found = Vec::new();
        for function in functions {
            let point = Point::Function {
                name: function.to_owned(),
                file: file.clone(),
                at: at.clone(),
            };
            let one = PerfProbe {
                point,
                ..probe.clone()
            };
            match self.places(&info, &one, source) {
                Ok(places) => found.push((one, places)),
                // Not every function has the requested point.
                Err(SourcesError::Definition(why)) => making.leave_out(function, why),
                Err(error) => return Err(error),
            }
        }
        few(probe, found.iter().map(|(_, places)| places.len()).sum())?;
        for (one, places) in &found {
            self.of_places(&info, one, places, &mut making)?;
        }
        making.finish()
    }

    /// Returns the places of the point of `probe`, which is not a pattern.
    fn places(
        &self,
        info: &DebugInfo<'_>,
        probe: &PerfProbe,
        source: Option<&Path>,
    ) -> Result<Vec<PointPlace>, SourcesError> {
        Ok(match &probe.point {
            Point::Function {
                name,
                file,
                at: At::Text(text),
            } => text_in_function(info, name, file.as_deref(), text, source)
                .map_err(|why| wrong(probe.column.0, &*why))?,
            Point::Text { file, text } => text_in_file(info, file, text, source)
                .map_err(|why| wrong(probe.column.0, &*why))?,
            point => match self.places_of(info, point) {
                Ok(places) => places,
                Err(error) => {
                    let symbol = matches!(error, DebugError::NoFunction { .. })
                        .then(|| self.by_symbol(point));
                    let place = symbol.flatten();
                    vec![place.ok_or_else(|| wrong(probe.column.0, &error))?]
                }
            },
        })
    }

    /// Makes definitions for `places` of `probe`.
    fn of_places(
        &self,
        info: &DebugInfo<'_>,
        probe: &PerfProbe,
        places: &[PointPlace],
        making: &mut Making,
    ) -> Result<(), SourcesError> {
        for place in places {
            match self.definition(info, probe, place, making) {
                Ok(line) => making.made.lines.push(line),
                Err(SourcesError::Definition(why)) => {
                    making.leave_out(&self.named(place.at), why);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the place of a symbol that the debug information does not list as a function, such as an alias of a
    /// function.
    fn by_symbol(&self, point: &Point) -> Option<PointPlace> {
        let Point::Function {
            name,
            file: None,
            at,
        } = point
        else {
            return None;
        };
        let offset = match at {
            At::Entry | At::Return => 0,
            At::Offset(offset) => *offset,
            At::Line(_) | At::Text(_) => return None,
        };
        let symbol = self.symbols().lookup(name).ok()?;
        let at = self.linked(symbol.addr.checked_add(offset)?);
        (offset < symbol.size.max(1)).then(|| PointPlace::of_symbol(at, name))
    }

    fn definition(
        &self,
        info: &DebugInfo<'_>,
        probe: &PerfProbe,
        place: &PointPlace,
        making: &mut Making,
    ) -> Result<String, SourcesError> {
        let is_return = matches!(&probe.point, Point::Function { at: At::Return, .. });
        let probepoint = self.address(place.at);
        let probepoint = probepoint.map_err(|why| wrong(probe.column.0, &why))?;
        let mut words = Vec::new();
        let variables = match is_return || probe.arguments.is_empty() {
            true => Vec::new(),
            false => info.variables(place)?,
        };
        for argument in &probe.arguments {
            let left_out = &mut making.made.left_out;
            words.extend(self.argument(info, argument, &variables, is_return, left_out)?);
        }
        let kind = if is_return { 'r' } else { 'p' };
        let group = probe.group.as_deref().unwrap_or("probe");
        let event = event(probe, place, &mut making.events);
        let mut line = format!("{kind}:{group}/{event} {probepoint}");
        for word in words {
            line.push(' ');
            line.push_str(&word);
        }
        if let Some(filter) = &probe.filter {
            line.push_str(&format!(" if {filter}"));
        }
        Ok(line)
    }

    /// Returns the fetch arguments that `argument` stands for.
    fn argument(
        &self,
        info: &DebugInfo<'_>,
        argument: &PerfArgument,
        variables: &[Variable],
        is_return: bool,
        left_out: &mut Vec<String>,
    ) -> Result<Vec<String>, SourcesError> {
        let column = argument.column.0;
        let ty = argument.ty.as_deref();
        let (name, path) = match &argument.value {
            PerfValue::Fetched(value) => {
                let ty = ty.map(|ty| format!(":{ty}")).unwrap_or_default();
                return Ok(vec![match &argument.name {
                    Some(name) => format!("{name}={value}{ty}"),
                    None => format!("{value}{ty}"),
                }]);
            }
            _ if is_return => {
                let why = "variables are those of the place where the function begins, not of its return: \
                           `$retval` is there; `r FUNC NAME` has arguments by name";
                return Err(refused(column, why));
            }
            PerfValue::Parameters | PerfValue::Variables => {
                let all = argument.value == PerfValue::Variables;
                let mut words = Vec::new();
                for variable in variables.iter().filter(|it| all || it.is_parameter) {
                    let selected = info.select(variable, &[])?;
                    match self.fetched(&selected, None, false) {
                        Ok(fetched) => words.push(format!("{}={fetched}", variable.name)),
                        Err(why) => left_out.push(format!("{}: {why}", variable.declaration)),
                    }
                }
                return Ok(words);
            }
            PerfValue::Variable { name, path } => (name, path),
        };
        let Some(variable) = variables.iter().find(|it| it.name == *name) else {
            let names: Vec<_> = variables.iter().map(|it| it.name.as_str()).collect();
            let there = match names.is_empty() {
                true => String::new(),
                false => format!("; there is {}", names.join(", ")),
            };
            return Err(refused(column, format!("no variable `{name}` here{there}")));
        };
        let selected = info
            .select(variable, path)
            .map_err(|error| wrong(column, &error))?;
        let fetched = self.fetched(&selected, ty, argument.user);
        let fetched = fetched.map_err(|why| {
            let way: String = path.iter().map(Step::to_string).collect();
            refused(column, format!("`{name}{way}` cannot be shown: {why}"))
        })?;
        let shown = match &argument.name {
            Some(given) => given.clone(),
            None => field(name, path, ty),
        };
        Ok(vec![format!("{shown}={fetched}")])
    }

    /// Returns the fetch argument for `selected` with its type, or why there is none.
    fn fetched(&self, selected: &Selected, ty: Option<&str>, user: bool) -> Result<String, String> {
        let is_text = matches!(ty, Some("string" | "ustring"));
        let (place, is_memory) = match &selected.location {
            Location::Fetch(fetch) => (fetch.to_string(), !fetch.offsets.is_empty()),
            Location::Static(_) if self.module().is_some() => return Err(OF_MODULE.to_owned()),
            Location::Static(at) => {
                let place = self.address(*at);
                let place = place.map_err(|why| format!("in memory of its own: {why}"))?;
                (format!("@{place}"), true)
            }
            Location::Constant(value) => (format!("\\{value}"), false),
            Location::Nowhere(why) => return Err((*why).to_owned()),
        };
        // Unsigned numbers are shown in hexadecimal, as in perf.
        let number = |element| {
            let element = match element {
                Element::Integer {
                    shown: Digits::Unsigned,
                    bits,
                } => Element::Integer {
                    shown: Digits::Hex,
                    bits,
                },
                other => other,
            };
            let ty = TypeName {
                column: Column::default(),
                element,
                count: None,
            };
            ty.to_string()
        };
        let (place, ty) = match (selected.shown, ty) {
            (Shown::Text, Some(ty)) if is_text => (format!("+0({place})"), ty.to_owned()),
            (Shown::Array { is_text: true, .. }, Some(ty)) if is_text && is_memory => {
                (place, ty.to_owned())
            }
            (_, Some(ty)) if is_text => {
                return Err(format!(
                    "no text is there for `{ty}`: it is no pointer to characters"
                ));
            }
            // A cast changes how a number is shown, not how wide it is.
            (Shown::Number(Element::Integer { bits, .. }), Some(ty @ ("u" | "s" | "x"))) => {
                (place, format!("{ty}{bits}"))
            }
            (Shown::Number(element), Some("u" | "s" | "x")) => (place, number(element)),
            (_, Some(ty)) => (place, ty.to_owned()),
            (Shown::Array { is_text: true, .. }, None) if is_memory => (place, "string".to_owned()),
            (
                Shown::Array {
                    element: Some(element),
                    count,
                    ..
                },
                None,
            ) if is_memory => {
                let shown = count.clamp(1, ARRAY_MAX.into());
                (place, format!("{}[{shown}]", number(element)))
            }
            (Shown::Array { .. } | Shown::Whole, None) => {
                return Err("it has several values: name a member or an element of it".to_owned());
            }
            (Shown::Text, None) => (place, "x64".to_owned()),
            (Shown::Number(element), None) => (place, number(element)),
        };
        let place = match user {
            false => place,
            true => match place.strip_prefix('+') {
                Some(rest) => format!("+u{rest}"),
                None => match place.strip_prefix('-') {
                    Some(rest) => format!("-u{rest}"),
                    // `@user` has no effect on a value that is not in memory, as in perf.
                    None => place,
                },
            },
        };
        Ok(format!("{place}:{ty}"))
    }
}

/// Finds the lines of the function `name` that match `text`. Returns their places.
fn text_in_function(
    info: &DebugInfo<'_>,
    name: &str,
    file: Option<&str>,
    text: &str,
    source: Option<&Path>,
) -> Result<Vec<PointPlace>, Box<dyn Error>> {
    let folder = source.ok_or(NO_SOURCE)?;
    let pattern = Pattern::new(text)?;
    let mut places = Vec::new();
    for function in info.lines(name, file)? {
        let source = Source::read(folder, &function.file)?;
        let matching: BTreeSet<u64> = source.lines(&pattern).collect();
        let is_one = |line: &&Line| {
            let number = function.first.checked_add(line.number);
            number.is_some_and(|number| matching.contains(&number))
        };
        for line in function.lines.iter().filter(is_one) {
            let point = Point::Function {
                name: name.to_owned(),
                file: Some(function.file.clone()),
                at: At::Line(line.number),
            };
            places.extend(info.places(&point)?);
        }
    }
    each_once(places, name, text)
}

/// Finds the lines that match `text`, in files whose paths end with `file`. Returns their places.
fn text_in_file(
    info: &DebugInfo<'_>,
    file: &str,
    text: &str,
    source: Option<&Path>,
) -> Result<Vec<PointPlace>, Box<dyn Error>> {
    let folder = source.ok_or(NO_SOURCE)?;
    let pattern = Pattern::new(text)?;
    let mut places = Vec::new();
    for path in info.files(file)? {
        let matching = Source::read(folder, &path)?.lines(&pattern).collect();
        places.extend(info.places_of_lines(&path, &matching)?);
    }
    each_once(places, file, text)
}

/// Sorts `places` and removes duplicates. Fails if there are none; the error names `text`, and the function or file
/// `what` that was searched.
fn each_once(
    mut places: Vec<PointPlace>,
    what: &str,
    text: &str,
) -> Result<Vec<PointPlace>, Box<dyn Error>> {
    places.sort_by_key(|place| place.at);
    places.dedup_by_key(|place| place.at);
    match places.is_empty() {
        true => Err(format!("no line of {what} that has code is `{text}`").into()),
        false => Ok(places),
    }
}

/// Refuses `probe` if it has too many `places`.
fn few(probe: &PerfProbe, places: usize) -> Result<(), SourcesError> {
    if places <= MOST_FUNCTIONS {
        return Ok(());
    }
    let message = format!(
        "{places} places; at most {MOST_FUNCTIONS} are possible here: name one by the line that it was inlined into, \
         as in CALLER:LINE, or by its address, as in 0x...; of a pattern, fewer functions"
    );
    Err(refused(probe.column.0, message))
}

/// Returns the name of the event at `place`, and reserves it in `names`. The rules are perf's
/// (`parse_perf_probe_command`, `probe_trace_event__set_name` and `get_new_event_name` in
/// tools/perf/util/probe-event.c).
fn event(probe: &PerfProbe, place: &PointPlace, names: &mut Names) -> String {
    let of_place = || place.inlined.as_ref().unwrap_or(&place.function).clone();
    let function = match &probe.point {
        Point::Function { name, .. } => name.clone(),
        Point::Line { .. } | Point::Text { .. } => of_place(),
        Point::Address(at) => format!("abs_{:x}", at.0),
    };
    // Without the compiler's suffixes, as in `foo.isra.0`.
    let whole = function.split('.').next().filter(|it| !it.is_empty());
    let function = whole.unwrap_or(&function);
    let event = match (&probe.event, &probe.point) {
        (Some(event), _) => event.clone(),
        (
            None,
            Point::Function {
                at: At::Line(line @ 1..),
                ..
            },
        ) => format!("{function}_L{line}"),
        (None, _) => function.to_owned(),
    };
    let event = match is_event_name(&event) {
        true => event,
        false => "probe".to_owned(),
    };
    let first = match &probe.point {
        Point::Function { at: At::Return, .. } => format!("{event}__return"),
        _ => event.clone(),
    };
    names.take(first, &event)
}

/// Returns the name of the field that shows `path` from `variable`, with the type `ty` if it is given. The
/// rules are perf's (`parse_perf_probe_arg` in tools/perf/util/probe-event.c, `find_variable` in
/// probe-finder.c).
fn field(variable: &str, path: &[Step], ty: Option<&str>) -> String {
    let member = path.iter().rev().find_map(|step| match step {
        Step::Member(name) | Step::Pointed(name) => Some(name.clone()),
        Step::Element(_) => None,
    });
    let typed = || {
        ty.filter(|_| path.is_empty())
            .map(|ty| format!("{variable}_{ty}"))
    };
    let found = member.or_else(typed).filter(|name| is_event_name(name));
    found.unwrap_or_else(|| variable.to_owned())
}

fn refused(column: usize, message: impl Into<String>) -> SourcesError {
    SourcesError::Definition(ParseError {
        column,
        message: message.into(),
    })
}

fn wrong(column: usize, error: &dyn Error) -> SourcesError {
    refused(column, error.to_string())
}
