//! Parser of fetch arguments.

use super::argument::{Expr, ExprKind, FetchArg};
use super::expression::{Gives, Read, Reader, STEPS, is_identifier};
use super::place::Place;
use super::read_type::{self, Found};
use super::types::{Element, TypeName};
use super::words;
use crate::column::Column;
use crate::parse_error::{ParseError, error};

/// Maximum number of arguments of a probe, as in the kernel (`MAX_TRACE_ARGS` in kernel/trace/trace_probe.h).
pub const ARGUMENTS_MAX: usize = 128;
/// Maximum length of an expression with its type, as in the kernel (`MAX_ARGSTR_LEN`).
pub const EXPRESSION_MAX: usize = 255;
/// Maximum length of an argument's name, as in the kernel (`MAX_ARG_NAME_LEN`).
pub const NAME_MAX: usize = 32;

/// Names of fields that every event has.
const RESERVED: [&str; 8] = [
    "common_type",
    "common_flags",
    "common_preempt_count",
    "common_pid",
    "common_tgid",
    "__probe_ip",
    "__probe_ret_ip",
    "__probe_func",
];

/// Parses the arguments in `words`, each with its column.
pub(crate) fn read_arguments(
    words: &[(usize, &str)],
    place: Place,
) -> Result<Vec<FetchArg>, ParseError> {
    if let (Some((column, _)), Some(_)) = (words.first(), words.get(ARGUMENTS_MAX)) {
        return error(
            *column,
            format!("{}; at most {ARGUMENTS_MAX}", words::TOO_MANY_ARGS),
        );
    }
    let mut arguments: Vec<FetchArg> = Vec::with_capacity(words.len());
    let mut names: Vec<String> = Vec::with_capacity(words.len());
    for (column, word) in words {
        if word.starts_with("$arg") && !place.has_arguments() {
            return error(*column, words::NOFENTRY_ARGS);
        }
        let argument = match word.strip_prefix("$arg*") {
            Some(suffix) => every_argument(*column, suffix, &arguments)?,
            None => {
                let (name, shown) = read_name(*column, word, names.len())?;
                if RESERVED.contains(&shown.as_str()) || names.contains(&shown) {
                    return error(*column, words::USED_ARG_NAME);
                }
                names.push(shown);
                read_argument(*column, word, name, place)?
            }
        };
        arguments.push(argument);
    }
    Ok(arguments)
}

/// Parses `$arg*`, followed by `suffix`.
fn every_argument(
    column: usize,
    suffix: &str,
    before: &[FetchArg],
) -> Result<FetchArg, ParseError> {
    if before
        .iter()
        .any(|argument| argument.expr.kind == ExprKind::Arguments)
    {
        return error(column, words::DOUBLE_ARGS);
    }
    if !suffix.is_empty() {
        return error(column, words::BAD_VAR_ARGS);
    }
    Ok(FetchArg {
        name: None,
        column: Column(column),
        expr: Expr {
            column: Column(column),
            kind: ExprKind::Arguments,
        },
        ty: None,
        text: "$arg*".to_owned(),
    })
}

/// Returns the name that `word` gives to the argument, if it gives one, and the name with which the argument is
/// shown. `before` is the number of arguments before it.
fn read_name(
    column: usize,
    word: &str,
    before: usize,
) -> Result<(Option<&str>, String), ParseError> {
    let Some((name, _)) = word.split_once('=') else {
        return Ok((None, default_name(word, before)));
    };
    if name.len() > NAME_MAX {
        return error(
            column,
            format!(
                "{}; at most {NAME_MAX} characters",
                words::ARG_NAME_TOO_LONG
            ),
        );
    }
    if name.is_empty() {
        return error(column, words::NO_ARG_NAME);
    }
    if !is_identifier(name) {
        return error(column, words::BAD_ARG_NAME);
    }
    Ok((Some(name), name.to_owned()))
}

/// Returns the name of an argument that the definition does not name: its text if that is an identifier, else a
/// name with its position.
fn default_name(text: &str, before: usize) -> String {
    let (name, ty) = text.split_once(':').unwrap_or((text, ""));
    if is_identifier(name) && !matches!(ty, "%pd" | "%pD") {
        return name.to_owned();
    }
    format!("arg{}", before + 1)
}

impl FetchArg {
    /// Returns the name with which the argument is shown: the given name, if there is one. Otherwise, as in the
    /// kernel, the name is that of the function's argument that is fetched (`count`), or it contains the position
    /// (`arg3`). `before` is the number of arguments before this one. For `$arg1`, a caller that knows the
    /// function's arguments has a better name.
    #[must_use]
    pub fn shown_name(&self, before: usize) -> String {
        match &self.name {
            Some(name) => name.clone(),
            None => default_name(&self.text, before),
        }
    }
}

/// Parses `word`. `name` is the text before its `=`, if there is one.
fn read_argument(
    column: usize,
    word: &str,
    name: Option<&str>,
    place: Place,
) -> Result<FetchArg, ParseError> {
    let at = column + name.map_or(0, |name| name.len() + 1);
    let text = &word[at - column..];
    if text.len() > EXPRESSION_MAX {
        return error(
            at,
            format!(
                "{}; at most {EXPRESSION_MAX} characters",
                words::ARG_TOO_LONG
            ),
        );
    }
    if text.is_empty() {
        return error(at, words::NO_ARG_BODY);
    }
    let (expr, ty) = match text.split_once(':') {
        None => (text, None),
        Some((expr, ty)) => (expr, Some(read_type::read_type(at + expr.len() + 1, ty)?)),
    };
    let found = match &ty {
        // These are texts without an address. Their only type is `string`.
        _ if matches!(expr, "$comm" | "$COMM") || expr.starts_with("\\\"") => {
            if let Some(ty) = ty.filter(|ty| ty.name != "string" || ty.count.is_some()) {
                return error(ty.column, words::NEED_STRING_TYPE);
            }
            ty.map(|_| Found::Element(Element::String))
        }
        Some(ty) => Some(ty.look_up()?),
        None => None,
    };
    let read = Reader::new(place).read(at, expr)?;
    let ty = match (ty, found) {
        (Some(ty), Some(found)) => Some(check_type(at, &read, ty, found)?),
        _ => None,
    };
    // Storing the value takes one more step, unless it is in memory: the step that reads it also stores it.
    // `check_type` has checked the steps of an argument with a type.
    if ty.is_none() && read.steps + usize::from(!is_memory(read.gives)) >= STEPS {
        return error(at, words::TOO_MANY_OPS);
    }
    Ok(FetchArg {
        name: name.map(str::to_owned),
        column: Column(column),
        expr: read.expr,
        ty,
        text: text.to_owned(),
    })
}

fn is_memory(gives: Gives) -> bool {
    matches!(gives, Gives::Memory | Gives::UserMemory)
}

/// Checks that the expression `read` can have the type that was found, and returns this type.
fn check_type(
    at: usize,
    read: &Read,
    ty: read_type::Read<'_>,
    found: Found,
) -> Result<TypeName, ParseError> {
    let array = ty.count.is_some();
    let text = matches!(
        found,
        Found::Element(Element::String | Element::UserString | Element::SymbolString)
    );
    // The type adds steps: to store the value itself, or to follow pointers to a name.
    let mut steps = read.steps;
    match found {
        Found::Element(Element::SymbolString) => {
            if !matches!(read.gives, Gives::Number | Gives::Typed | Gives::Memory) {
                return error(ty.column, words::BAD_SYMSTRING);
            }
            steps += 1;
        }
        Found::Element(Element::String | Element::UserString) => {
            if matches!(read.gives, Gives::Number | Gives::Address) {
                return error(
                    ty.column,
                    format!("{}; write `+0(...)` around an address", words::BAD_STRING),
                );
            }
            let stored = matches!(read.gives, Gives::Constant | Gives::Text) || array;
            steps += usize::from(stored);
        }
        Found::Element(Element::DentryName) => steps += 2,
        Found::Element(Element::FileName) => steps += 3,
        _ => steps += usize::from(!is_memory(read.gives)),
    }
    if steps >= STEPS {
        return error(at, words::TOO_MANY_OPS);
    }
    let element = match found {
        Found::Element(element) => element,
        Found::Bits { container } => {
            let element = ty.bit_field(container)?;
            steps += 1;
            if steps >= STEPS {
                return error(ty.column, words::BAD_BITFIELD);
            }
            element
        }
    };
    if array {
        let pointers = text && element != Element::SymbolString;
        if !(read.gives == Gives::Memory && !text || pointers) {
            return error(ty.column, words::BAD_STRING);
        }
        if steps + 1 >= STEPS {
            return error(at, words::TOO_MANY_OPS);
        }
    }
    if matches!(element, Element::DentryName | Element::FileName) && read.gives == Gives::Text {
        return error(at, words::COMM_CANT_DEREF);
    }
    Ok(ty.named(element))
}
