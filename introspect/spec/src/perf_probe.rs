//! Probes in the syntax of `perf probe`.
//!
//! ```text
//! definition = [[GROUP ":"] EVENT "="] point {blanks argument} [blanks "if" FILTER]
//! argument   = [NAME "="] value [":" TYPE] ["@user"]
//! value      = VARIABLE {member} | "$params" | "$vars" | fetched
//! member     = "." NAME | "->" NAME | "[" NUMBER "]"
//! ```
//!
//! A point is a [`Point`]. A `fetched` value begins with `$`, `%`, `@`, `+`, `-` or `\`, and has the syntax of
//! kprobe_events. FILTER has the syntax of filters in a [`definition`](crate::definition); the definitions of perf
//! itself have no filters. Invariant: a text with the syntax of kprobe_events never also has this syntax
//! ([`is_perf_probe`]), so both can be used in the same place.

use std::fmt;

use crate::column::Column;
use crate::definition::{begins_filter, is_event_name};
use crate::number::{number_in, strip_hex};
use crate::parse_error::{ParseError, error, quoted};
use crate::point::Point;

/// Maximum number of arguments, as for other probes (`MAX_TRACE_ARGS` in kernel/trace/trace_probe.h).
const MOST_ARGUMENTS: usize = 128;
/// Maximum number of steps from a variable to a value.
const MOST_MEMBERS: usize = 64;

/// Probe at a point in the sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerfProbe {
    /// Group of the events, if given.
    pub group: Option<String>,
    /// Name of the events, if given.
    pub event: Option<String>,
    /// Place of the probe.
    pub point: Point,
    /// Column of the point.
    pub column: Column,
    /// Values that are shown.
    pub arguments: Vec<PerfArgument>,
    /// Filter of the hits, as written.
    pub filter: Option<String>,
}

/// Value that is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerfArgument {
    /// Name, if given.
    pub name: Option<String>,
    /// Column of the value.
    pub column: Column,
    /// Source of the value.
    pub value: PerfValue,
    /// Type of the value, if given.
    pub ty: Option<String>,
    /// Whether the value is read from user memory.
    pub user: bool,
}

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PerfValue {
    /// Parameter or local variable, or a part of one.
    Variable {
        /// Name of the variable.
        name: String,
        /// Steps from the variable to the value.
        path: Vec<Step>,
    },
    /// `$params`: all readable parameters.
    Parameters,
    /// `$vars`: all readable parameters and local variables.
    Variables,
    /// Fetch argument of kprobe_events, which needs no debug information.
    Fetched(String),
}

/// Step into a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `.NAME`: member of the structure.
    Member(String),
    /// `->NAME`: member of the structure that the value points to.
    Pointed(String),
    /// `[N]`: element of the array.
    Element(u64),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Member(name) => write!(f, ".{name}"),
            Self::Pointed(name) => write!(f, "->{name}"),
            Self::Element(number) => write!(f, "[{number}]"),
        }
    }
}

/// Returns whether `text` is meant for [`PerfProbe::parse`]: whether it has a word, and does not begin like a line
/// of kprobe_events. Such a line begins with `-`, or with `p`, `r` or `f` followed by an optional number and an
/// optional `:NAME`.
#[must_use]
pub fn is_perf_probe(text: &str) -> bool {
    let Some(word) = text.split([' ', '\t']).find(|word| !word.is_empty()) else {
        return false;
    };
    let kind = word.split(':').next().unwrap_or(word);
    let is_kind =
        kind.strip_prefix(['p', 'r', 'f'])
            .is_some_and(|number| match strip_hex(number) {
                Some(digits) => digits.chars().all(|c| c.is_ascii_hexdigit()),
                None => number.chars().all(|c| c.is_ascii_digit()),
            });
    !is_kind && !word.starts_with('-')
}

impl PerfProbe {
    /// Parses a definition.
    ///
    /// # Errors
    /// Returns the column and the reason if the text is not a definition.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut words = words(text);
        let Some((column, first)) = words.next() else {
            return error(0, "a function or a line of the sources belongs here");
        };
        let (group, event, at, point) = match first.split_once('=') {
            // The text of a point with `;` may contain any character, including `=`.
            Some((event, point)) if !event.contains(';') => {
                let (group, event) = event_name(column, event)?;
                let at = column + first.chars().count() - point.chars().count();
                (group, Some(event), at, point)
            }
            _ => (None, None, column, first),
        };
        let point = Point::parse(point).map_err(|wrong| ParseError {
            column: at + wrong.column,
            ..wrong
        })?;
        let mut arguments = Vec::new();
        let mut filter = None;
        for (column, word) in words {
            if begins_filter(word) {
                let behind = column + "if".len();
                let rest: String = text.chars().skip(behind).collect();
                if rest.trim().is_empty() {
                    return error(behind, "missing filter behind `if`");
                }
                filter = Some(rest.trim().to_owned());
                break;
            }
            if arguments.len() == MOST_ARGUMENTS {
                return error(column, format!("more than {MOST_ARGUMENTS} arguments"));
            }
            arguments.push(argument(column, word)?);
        }
        Ok(Self {
            group,
            event,
            point,
            column: Column(at),
            arguments,
            filter,
        })
    }
}

/// Returns the words of `text`, each with its column.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut column = 0;
    text.split([' ', '\t']).filter_map(move |word| {
        let at = column;
        column += word.chars().count() + 1;
        (!word.is_empty()).then_some((at, word))
    })
}

/// Parses `EVENT` or `GROUP:EVENT`.
fn event_name(column: usize, text: &str) -> Result<(Option<String>, String), ParseError> {
    let (group, event) = match text.split_once([':', '/']) {
        Some((group, event)) => (Some(group), event),
        None => (None, text),
    };
    for name in group.into_iter().chain([event]) {
        if !is_event_name(name) {
            return error(
                column,
                format!(
                    "{} cannot be the name of an event: letters, digits and `_` can, no digit first",
                    quoted(name)
                ),
            );
        }
    }
    Ok((group.map(str::to_owned), event.to_owned()))
}

fn argument(column: usize, word: &str) -> Result<PerfArgument, ParseError> {
    let odd = |c: &char| !('!'..='~').contains(c);
    if let Some((at, c)) = word.chars().enumerate().find(|(_, c)| odd(c)) {
        return error(column + at, format!("{c:?} cannot be part of an argument"));
    }
    let (name, rest) = match word.split_once('=') {
        Some((name, rest)) if is_event_name(name) => (Some(name.to_owned()), rest),
        Some((name, _)) => {
            return error(
                column,
                format!(
                    "{} cannot be the name of an argument: letters, digits and `_` can, no digit first",
                    quoted(name)
                ),
            );
        }
        None => (None, word),
    };
    let at = column + word.len() - rest.len();
    let (rest, user) = match rest.strip_suffix("@user") {
        Some(rest) => (rest, true),
        None => (rest, false),
    };
    let (value, ty) = match rest.rsplit_once(':') {
        Some((_, "")) => return error(at + rest.len(), "missing type behind `:`"),
        Some((value, ty)) => (value, Some(ty.to_owned())),
        None => (rest, None),
    };
    let kind = match value {
        "" => return error(at, "a variable belongs here"),
        "$params" => PerfValue::Parameters,
        "$vars" => PerfValue::Variables,
        _ if value.starts_with(['$', '%', '@', '+', '-', '\\']) => {
            PerfValue::Fetched(value.to_owned())
        }
        _ => variable(at, value)?,
    };
    let refused = match kind {
        PerfValue::Parameters | PerfValue::Variables if name.is_some() || ty.is_some() || user => {
            "stands for several variables: it has neither a name nor a type of its own"
        }
        PerfValue::Fetched(_) if user => {
            "says itself which memory it is read from: `+u8(...)` is the user's"
        }
        _ => {
            return Ok(PerfArgument {
                name,
                column: Column(at),
                value: kind,
                ty,
                user,
            });
        }
    };
    error(at, format!("{} {refused}", quoted(value)))
}

/// Returns the length of the C identifier at the start of `text`.
fn name_length(text: &str) -> usize {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    match text.starts_with(|c: char| c.is_ascii_digit()) {
        true => 0,
        false => text.find(|c| !is_part(c)).unwrap_or(text.len()),
    }
}

fn variable(column: usize, text: &str) -> Result<PerfValue, ParseError> {
    let length = name_length(text);
    if length == 0 {
        return error(column, "a variable belongs here");
    }
    let (name, mut rest) = text.split_at(length);
    let mut path = Vec::new();
    while !rest.is_empty() {
        let at = column + text.len() - rest.len();
        if path.len() == MOST_MEMBERS {
            return error(at, format!("more than {MOST_MEMBERS} members in a row"));
        }
        if let Some(behind) = rest.strip_prefix('[') {
            let Some((digits, behind)) = behind.split_once(']') else {
                return error(at, "missing `]`");
            };
            let number = number_in(at + 1, digits, "index", || {
                "missing index behind `[`".to_owned()
            })?;
            path.push(Step::Element(number));
            rest = behind;
            continue;
        }
        let (behind, step): (_, fn(String) -> Step) = if let Some(behind) = rest.strip_prefix("->")
        {
            (behind, Step::Pointed)
        } else if let Some(behind) = rest.strip_prefix('.') {
            (behind, Step::Member)
        } else {
            return error(at, "only `.MEMBER`, `->MEMBER` or `[N]` can follow here");
        };
        let length = name_length(behind);
        if length == 0 {
            let at = at + rest.len() - behind.len();
            return error(at, "the name of a member belongs here");
        }
        let (member, behind) = behind.split_at(length);
        path.push(step(member.to_owned()));
        rest = behind;
    }
    let name = name.to_owned();
    Ok(PerfValue::Variable { name, path })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::point::At;

    #[test]
    fn lines_of_kprobe_events_are_none() {
        for text in [
            "p vfs_read",
            " p:a vfs_read",
            "r4 vfs_read",
            "r0x1f:a vfs_read",
            "r",
            "-:a",
            "",
        ] {
            assert!(!is_perf_probe(text), "{text:?}");
        }
        for text in [
            "vfs_read",
            "pipe_read:3",
            "p=vfs_read",
            "r2d2",
            "r0xyz",
            " fs/a.c:3",
        ] {
            assert!(is_perf_probe(text), "{text:?}");
        }
    }

    #[test]
    fn definitions_are_read_as_perf_reads_them() {
        let text = "my:ev=vfs_read@fs/a.c:12 count pos=file->f_pos:x64 a.b[2]->c buf:string@user %ax $vars if count > 3";
        let probe = PerfProbe::parse(text).unwrap();
        assert_eq!(
            (probe.group.as_deref(), probe.event.as_deref()),
            (Some("my"), Some("ev"))
        );
        let point = Point::Function {
            name: "vfs_read".to_owned(),
            file: Some("fs/a.c".to_owned()),
            at: At::Line(12),
        };
        assert_eq!(probe.point, point);
        assert_eq!(probe.filter.as_deref(), Some("count > 3"));
        let variable = |name: &str, path: &[Step]| PerfValue::Variable {
            name: name.to_owned(),
            path: path.to_vec(),
        };
        let name = |text: &str| text.to_owned();
        let wanted = [
            (None, 25, variable("count", &[]), None, false),
            (
                Some("pos"),
                35,
                variable("file", &[Step::Pointed(name("f_pos"))]),
                Some("x64"),
                false,
            ),
            (
                None,
                51,
                variable(
                    "a",
                    &[
                        Step::Member(name("b")),
                        Step::Element(2),
                        Step::Pointed(name("c")),
                    ],
                ),
                None,
                false,
            ),
            (None, 61, variable("buf", &[]), Some("string"), true),
            (None, 77, PerfValue::Fetched(name("%ax")), None, false),
            (None, 81, PerfValue::Variables, None, false),
        ];
        assert_eq!(probe.arguments.len(), wanted.len());
        for (found, (name, column, value, ty, user)) in probe.arguments.iter().zip(wanted) {
            assert_eq!(found.name.as_deref(), name);
            assert_eq!((found.column.0, &found.value), (column, &value));
            assert_eq!((found.ty.as_deref(), found.user), (ty, user));
        }
        let lazy = PerfProbe::parse("vfs_read;ret=*").unwrap();
        assert_eq!(
            (lazy.event, lazy.point.to_string()),
            (None, name("vfs_read;ret=*"))
        );
    }

    #[test]
    fn filters_begin_as_in_kprobe_events() {
        for (text, filter) in [
            ("vfs_read if pid==1", "pid==1"),
            ("vfs_read a if(pid==1) && a", "(pid==1) && a"),
            ("vfs_read a if!(pid==1)", "!(pid==1)"),
        ] {
            let probe = PerfProbe::parse(text).unwrap();
            assert_eq!(probe.filter.as_deref(), Some(filter), "{text}");
            assert!(probe.arguments.len() < 2, "{text}");
        }
    }

    #[test]
    fn mistakes_are_reported_where_they_are() {
        for (text, column) in [
            (" ", 0),
            ("1=vfs_read", 0),
            ("a:b:c=vfs_read", 0),
            ("ev=vfs-read", 6),
            ("vfs_read 1x", 9),
            ("vfs_read a=", 11),
            ("vfs_read 1=a", 9),
            ("vfs_read a:", 11),
            ("vfs_read a->", 12),
            ("vfs_read a.1", 11),
            ("vfs_read a[", 10),
            ("vfs_read a[x]", 11),
            ("vfs_read a!", 10),
            ("vfs_read é", 9),
            ("vfs_read x=$vars", 11),
            ("vfs_read $params:u8", 9),
            ("vfs_read %ax@user", 9),
            ("vfs_read a if", 13),
            ("vfs_read iffy(", 13),
        ] {
            let wrong = PerfProbe::parse(text).unwrap_err();
            assert_eq!(wrong.column, column, "{text}: {wrong}");
        }
        let many = format!("vfs_read{}", " a".repeat(MOST_ARGUMENTS + 1));
        assert!(PerfProbe::parse(&many).is_err());
        let long = format!("vfs_read a{}", "[0]".repeat(MOST_MEMBERS + 1));
        assert!(PerfProbe::parse(&long).is_err());
    }
}
