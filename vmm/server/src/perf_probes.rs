//! From a probe as `perf probe` defines it to definitions for each place that it stands for.
//!
//! Invariant: a definition names a symbol of the kernel that was given, which no other symbol of it shares its
//! name with, and fetches what the debug information says is there, at that one address. What is left out of what
//! was asked for is told.

mod source_text;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;

use hvprobe_arch::Gva;
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
use crate::sources::{OF_MODULE, Sources, SourcesError};

const NO_SOURCE: &str = "a text is looked for in the sources: give --source";

/// What a probe of perf's comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Definitions {
    /// A definition for each place, in the order of their addresses.
    pub lines: Vec<String>,
    /// What was left out, and why: places, or variables of `$vars` and `$params`.
    pub left_out: Vec<String>,
}

impl Sources {
    /// Definitions of what `probe` stands for; `source` is the folder of the kernel's sources, if it is there.
    ///
    /// # Errors
    /// When there is no such place, or one of its arguments can be read at none of them; when the debug
    /// information is damaged.
    pub fn definitions(
        &self,
        probe: &PerfProbe,
        source: Option<&Path>,
    ) -> Result<Definitions, SourcesError> {
        let info = self.info()?;
        let found = match &probe.point {
            Point::Function {
                name,
                file,
                at: At::Text(text),
            } => text_in_function(&info, name, file.as_deref(), text, source)
                .map_err(|why| wrong(probe.column.0, &*why))?,
            Point::Text { file, text } => text_in_file(&info, file, text, source)
                .map_err(|why| wrong(probe.column.0, &*why))?,
            point => match info.places(point) {
                Ok(places) => places,
                Err(error) => {
                    let symbol = matches!(error, DebugError::NoFunction { .. })
                        .then(|| self.by_symbol(point));
                    let place = symbol.flatten();
                    vec![place.ok_or_else(|| wrong(probe.column.0, &error))?]
                }
            },
        };
        let mut made = Definitions::default();
        let mut first_refused = None;
        for place in &found {
            match self.definition(&info, probe, place, &mut made) {
                Ok(line) => made.lines.push(line),
                Err(SourcesError::Definition(why)) => {
                    made.left_out
                        .push(format!("{}: {why}", self.named(place.at)));
                    first_refused.get_or_insert(SourcesError::Definition(why));
                }
                Err(error) => return Err(error),
            }
        }
        match (made.lines.is_empty(), first_refused) {
            (true, Some(refused)) => Err(refused),
            _ => Ok(made),
        }
    }

    /// The place of a symbol that the debug information has no function of, such as a function's second name.
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
        let at = symbol.addr.0.checked_add(offset)?;
        (offset < symbol.size.max(1)).then(|| PointPlace::of_symbol(Gva(at), name))
    }

    fn definition(
        &self,
        info: &DebugInfo<'_>,
        probe: &PerfProbe,
        place: &PointPlace,
        made: &mut Definitions,
    ) -> Result<String, SourcesError> {
        let is_return = matches!(&probe.point, Point::Function { at: At::Return, .. });
        let probepoint = self.address(place.at);
        let probepoint = probepoint.map_err(|why| wrong(probe.column.0, &why))?;
        let kind = if is_return { 'r' } else { 'p' };
        let group = probe.group.as_deref().unwrap_or("probe");
        let event = event(probe, place, made.lines.len());
        let mut line = format!("{kind}:{group}/{event} {probepoint}");
        let variables = match is_return || probe.arguments.is_empty() {
            true => Vec::new(),
            false => info.variables(place)?,
        };
        for argument in &probe.arguments {
            for word in self.argument(info, argument, &variables, is_return, &mut made.left_out)? {
                line.push(' ');
                line.push_str(&word);
            }
        }
        if let Some(filter) = &probe.filter {
            line.push_str(&format!(" if {filter}"));
        }
        Ok(line)
    }

    /// The fetch arguments that an argument stands for.
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
        let fetched =
            fetched.map_err(|why| refused(column, format!("`{name}` cannot be shown: {why}")))?;
        let own = path.iter().rev().find_map(|step| match step {
            Step::Member(name) | Step::Pointed(name) => Some(name),
            Step::Element(_) => None,
        });
        let shown = argument.name.as_ref().or(own).unwrap_or(name);
        Ok(vec![format!("{shown}={fetched}")])
    }

    /// How a definition fetches it, with its type; or why it cannot.
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
        // As perf has it, for numbers without a sign.
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
                    None => return Err("it is in no memory, so not in the user's".to_owned()),
                },
            },
        };
        Ok(format!("{place}:{ty}"))
    }
}

/// The places of the lines of a function that a text is in.
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

/// The places of the lines of files, whose paths end with `file`, that a text is in.
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

/// `places`, in their order, of which there has to be one where `text` was looked for in `what`.
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

/// The name of the event at the place with that number: perf's, which newer ones give.
fn event(probe: &PerfProbe, place: &PointPlace, number: usize) -> String {
    let line = match &probe.point {
        Point::Line { line, .. } => Some(line),
        Point::Function {
            at: At::Line(line), ..
        } => Some(line),
        Point::Function { .. } | Point::Text { .. } => None,
    };
    let function = match &probe.point {
        Point::Function { name, .. } => name,
        Point::Line { .. } | Point::Text { .. } => {
            place.inlined.as_ref().unwrap_or(&place.function)
        }
    };
    let mut event = match (&probe.event, line) {
        (Some(event), _) => event.clone(),
        (None, Some(line)) => format!("{function}_L{line}"),
        (None, None) => function.clone(),
    };
    let is_return = matches!(&probe.point, Point::Function { at: At::Return, .. });
    if probe.event.is_none() && is_return {
        event.push_str("__return");
    }
    if number > 0 {
        event.push_str(&format!("_{number}"));
    }
    event = event.replace('.', "_");
    match is_event_name(&event) {
        true => event,
        false => format!("probe_{number}"),
    }
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
