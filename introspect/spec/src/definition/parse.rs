//! Parser of definitions.

use hvprobe_arch::Gva;

use super::line::{Definition, Kind, Marks, Target};
use super::names::{KERNEL, LONGEST_MODULE, LONGEST_SYMBOL, identifier, is_event_name};
use super::pattern::{is_pattern, read_pattern};
use crate::column::Column;
use crate::cursor::unprintable;
use crate::fetch::{Place, read_arguments, read_filter_at};
use crate::number::{number_in, strip_hex};
use crate::parse_error::{ParseError, bounded, error};
use crate::symbol::symbol_length;

/// Maximum number of calls in flight that a definition can give, as in the kernel (`KRETPROBE_MAXACTIVE_MAX` in
/// kernel/trace/trace_kprobe.c).
const MOST_ACTIVE: u64 = 4096;

/// Maximum distance of a function's entry from its symbol: the length of an ENDBR64.
const ENTRY: u64 = 4;

/// Parses one definition.
///
/// # Errors
/// Returns the column and the reason if the text is not a definition.
pub fn parse(text: &str) -> Result<Definition, ParseError> {
    // After this check each character is one byte, so byte offsets are columns.
    if let Some((column, c)) = unprintable(text) {
        let what = match c {
            '\n' | '\r' => "line break",
            c if c.is_control() => "control character",
            _ => "character outside ASCII",
        };
        return error(
            column,
            format!("{what} {:?}: a definition is one line of ASCII", c),
        );
    }
    let words = words(text);
    let Some(&(column, head)) = words.first() else {
        return error(
            text.len(),
            "empty definition: write `p SYMBOL`, for example `p vfs_read`",
        );
    };
    let Head {
        kind,
        name,
        function,
    } = read_head(text, column, head, words.len())?;
    let Some(&(at, word)) = words.get(1) else {
        return error(text.len(), "missing target: a symbol or address to probe");
    };
    let Aimed {
        target,
        marks,
        returns,
    } = read_target(at, word)?;
    if let (true, Kind::Return { .. }, false) = (function, kind, returns) {
        let message = "the number of calls in flight belongs to returns: write SYMBOL%return";
        return error(column + 1, message);
    }
    let kind = match kind {
        Kind::Probe if returns => Kind::Return { maxactive: None },
        kind => kind,
    };
    let is_anywhere = target.is_from_beginning();
    if let (Kind::Return { .. }, Target::Symbol { offset: 1.., .. }, false) =
        (kind, &target, is_anywhere)
    {
        return error(
            at + word.find('+').unwrap_or(0),
            "a return probe begins at the function's entry: leave out the offset",
        );
    }
    let is_named = name.as_ref().is_some_and(|name| !name.ends_with('/'));
    if let (Target::Functions { .. }, true, Some(colon)) = (&target, is_named, head.find(':')) {
        return error(
            column + colon,
            "a name belongs to one probe: leave it out, the probes of a pattern have names of their own",
        );
    }
    let name = match function {
        true => Some(of_function(column, head, kind, name, &target, marks)?),
        false => name,
    };
    let (arguments, filter) = split_filter(&words[2..]);
    if let Some(&(column, word)) = arguments.first() {
        no_second_target(&target, is_named, column, word)?;
    }
    let place = Place {
        returns: matches!(kind, Kind::Return { .. }),
        entry: is_anywhere || !matches!(target, Target::Symbol { offset, .. } if offset > ENTRY),
    };
    let arguments = read_arguments(arguments, place)?;
    let filter = match filter {
        Some(at) => Some(read_filter_at(at, &text[at..])?),
        None => None,
    };
    Ok(Definition {
        kind,
        name,
        target,
        arguments,
        filter,
        marks,
    })
}

/// Returns whether a filter begins with `word`: `if`, or `if` directly followed by a `(` or `!` of the filter.
pub(crate) fn begins_filter(word: &str) -> bool {
    word == "if" || word.starts_with("if(") || word.starts_with("if!")
}

/// Returns the fetch arguments among `words`, and, if there is a filter, the column directly after its `if`.
fn split_filter<'a, 'b>(words: &'b [(usize, &'a str)]) -> (&'b [(usize, &'a str)], Option<usize>) {
    match words.iter().position(|(_, word)| begins_filter(word)) {
        Some(index) => (&words[..index], Some(words[index].0 + "if".len())),
        None => (words, None),
    }
}

/// Returns the words of `text`, each with its column.
fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut start = None;
    for (column, c) in text.char_indices().chain([(text.len(), ' ')]) {
        match (start, c == ' ' || c == '\t') {
            (None, false) => start = Some(column),
            (Some(from), true) => {
                words.push((from, &text[from..column]));
                start = None;
            }
            _ => {}
        }
    }
    words
}

/// Returns the name of the event of a function probe (`f`). The kernel names it by different rules than the events
/// of `p` and `r`: with another group and another suffix (`parse_symbol_and_return`, `trace_fprobe_create_internal`
/// in kernel/trace/trace_fprobe.c). Apart from the name, the probe is the same.
fn of_function(
    column: usize,
    head: &str,
    kind: Kind,
    name: Option<String>,
    target: &Target,
    marks: Marks,
) -> Result<String, ParseError> {
    let symbol = match target {
        Target::Symbol {
            name, offset: 0, ..
        } => name,
        Target::Symbol { .. } => {
            let message = "a function probe is at the function's entry: leave out the offset, or begin with `p`";
            return error(marks.offset.0, message);
        }
        Target::Functions { .. } => {
            return error(
                marks.place.0,
                "a function probe (`f`) names one function: begin with `p` or `r`",
            );
        }
        Target::Address(_) => {
            return error(
                marks.place.0,
                "a function probe (`f`) names a function: begin with `p` or `r`",
            );
        }
    };
    let suffix = match kind {
        Kind::Probe => "entry",
        Kind::Return { .. } => "exit",
    };
    let event = format!("{}__{suffix}", symbol.replace('.', "_"));
    let made = match name {
        None => format!("{FUNCTIONS}/{event}"),
        Some(group) if group.ends_with('/') => group + &event,
        Some(name) if name.contains('/') => return Ok(name),
        Some(name) => return Ok(format!("{FUNCTIONS}/{name}")),
    };
    // The kernel replaces only dots by `_` (`sanitize_event_name` in kernel/trace/trace_probe.h).
    let strange = symbol.find(|c: char| !(c == '_' || c == '.' || c.is_ascii_alphanumeric()));
    let (at, why) = match strange {
        _ if is_event_name(made.rsplit('/').next().unwrap_or(&made)) => return Ok(made),
        Some(strange) => (marks.place.0 + strange, "has what no name of an event has"),
        None => (column + head.len(), "is too long for that of an event"),
    };
    let message = format!("the function's name {why}: give one, as in `f:NAME`");
    error(at, message)
}

/// Default group of function probes (`FPROBE_EVENT_SYSTEM` in kernel/trace/trace_fprobe.c).
const FUNCTIONS: &str = "fprobes";

/// Parsed first word.
struct Head {
    kind: Kind,
    name: Option<String>,
    /// Whether the word begins a function probe (`f`).
    function: bool,
}

/// Parses the first word: `p`, `p:NAME`, `r`, `r20:NAME`, `f`, `f20`.
fn read_head(text: &str, column: usize, head: &str, words: usize) -> Result<Head, ParseError> {
    let (word, name) = match head.split_once(':') {
        Some((word, name)) => (word, Some(name)),
        None => (head, None),
    };
    let kind = match word.split_at_checked(1) {
        Some(("p", "")) => Kind::Probe,
        Some(("r", "")) => Kind::Return { maxactive: None },
        Some(("f", "")) if words > 1 => Kind::Probe,
        Some(("r" | "f", rest)) if is_number(rest, words) => Kind::Return {
            maxactive: Some(maxactive(column + 1, rest)?),
        },
        Some(("p", rest)) if is_number(rest, words) => {
            return error(
                column + 1,
                format!("the number of calls in flight belongs to return probes: write `r{rest}`"),
            );
        }
        _ => return error(column, not_a_kind(text.trim(), word, words)),
    };
    let function = word.starts_with('f');
    let Some(name) = name else {
        return Ok(Head {
            kind,
            name: None,
            function,
        });
    };
    let mut at = column + word.len() + 1;
    let parts: Vec<&str> = name.split('/').collect();
    if parts.len() > 2 {
        return error(
            at + parts[0].len() + 1 + parts[1].len(),
            "a name is EVENT, GROUP/EVENT or GROUP/",
        );
    }
    for (index, part) in parts.iter().enumerate() {
        // The event's name may be empty after a group: the kernel generates it.
        if index == 0 || !part.is_empty() {
            identifier(at, part)?;
        }
        at += part.len() + 1;
    }
    Ok(Head {
        kind,
        name: Some(name.to_owned()),
        function,
    })
}

/// Returns whether `text`, which follows the kind in a definition of `words` words, is meant as a number. As in
/// the kernel, its first character decides. If the definition is a single word, all characters must be digits,
/// because the word may be a symbol without a kind.
fn is_number(text: &str, words: usize) -> bool {
    let is_all = match strip_hex(text) {
        Some(digits) => digits.bytes().all(|b| b.is_ascii_hexdigit()),
        None => text.bytes().all(|b| b.is_ascii_digit()),
    };
    text.starts_with(|c: char| c.is_ascii_digit()) && (is_all || words > 1)
}

fn maxactive(column: usize, word: &str) -> Result<u32, ParseError> {
    let wanted = number(column, word, "number of calls in flight")?;
    match u32::try_from(wanted) {
        Ok(number @ 1..) if wanted <= MOST_ACTIVE => Ok(number),
        _ => error(
            column,
            format!("{wanted} calls in flight: between 1 and {MOST_ACTIVE} can be followed"),
        ),
    }
}

/// Message about the beginning of a definition.
const STARTS: &str =
    "a definition starts with `p`, `r` or `f`, or with `p:NAME`, `r:NAME` or `f:NAME`";

/// Returns the message about a first word that is no known kind.
fn not_a_kind(text: &str, kind: &str, words: usize) -> String {
    let digits = |rest: &str| rest.bytes().all(|b| b.is_ascii_digit());
    let what = match kind.split_at_checked(1) {
        _ if matches!(kind, "tracepoint" | "rawtracepoint") => "tracepoint probes (`t`)",
        _ if matches!(kind, "uprobe" | "uretprobe" | "usdt") => "user-space probes (`u`)",
        Some(("t", rest)) if digits(rest) => "tracepoint probes (`t`)",
        Some(("e", "")) => "event probes (`e`)",
        Some(("s", "")) => "synthetic events (`s`)",
        Some(("u", "")) => "user-space probes (`u`)",
        Some(("w", "")) => "watchpoints (`w`)",
        Some(("-", "")) => "removing events by definition (`-`)",
        _ if words == 1 => match read_target(0, text) {
            Ok(_) => {
                let text = bounded(text);
                return format!("a definition starts with `p` or `r`: write `p {text}`");
            }
            Err(error) if error.column == 0 => return error.message,
            Err(_) => return STARTS.to_owned(),
        },
        _ => {
            return STARTS.to_owned();
        }
    };
    format!("not supported: {what}; write `p SYMBOL` or `r SYMBOL`")
}

/// Parsed target.
struct Aimed {
    target: Target,
    marks: Marks,
    /// Whether `%return` follows the target.
    returns: bool,
}

/// Parses the target that begins at `column`.
fn read_target(column: usize, word: &str) -> Result<Aimed, ParseError> {
    let marks = |place, offset| Marks {
        target: Column(column),
        place: Column(place),
        offset: Column(offset),
    };
    if let Some(digits) = strip_hex(word) {
        if let Some(sign) = digits.find(['+', '-']) {
            return error(column + 2 + sign, "an address takes no offset: add it up");
        }
        if let Some(percent) = digits.find('%') {
            return error(
                column + 2 + percent,
                "`%return` follows a symbol: write `r 0xADDRESS`",
            );
        }
        let at = number(column, word, "address")?;
        return Ok(Aimed {
            target: Target::Address(Gva(at)),
            marks: marks(column, column),
            returns: false,
        });
    }
    if word.starts_with('@') || word.starts_with('$') || word.starts_with('%') {
        return error(
            column,
            "a symbol or address to probe is missing before the fetch arguments",
        );
    }
    let (place, returns) = match word.split_once('%') {
        None => (word, false),
        Some((place, "return")) => (place, true),
        Some((place, _)) => {
            return error(
                column + place.len(),
                "only `%return` can follow a symbol after `%`",
            );
        }
    };
    let (module, place, at) = match place.split_once(':') {
        None => (None, place, column),
        Some((module, rest)) => {
            module_name(column, module)?;
            let at = column + module.len() + 1;
            if rest.is_empty() {
                return error(at, "missing symbol after the module's name");
            }
            (Some(module.to_owned()), rest, at)
        }
    };
    if is_pattern(place) {
        let pattern = read_pattern(at, place)?;
        return Ok(Aimed {
            target: Target::Functions { module, pattern },
            marks: marks(at, at),
            returns,
        });
    }
    let (name, offset) = symbol(at, place)?;
    let offset_at = place.find('+').map_or(at, |plus| at + plus + 1);
    let target = Target::Symbol {
        module: module.filter(|module| module != KERNEL),
        name,
        offset,
    };
    Ok(Aimed {
        target,
        marks: marks(at, offset_at),
        returns,
    })
}

/// Words that begin a probe in scripts of bpftrace. A definition has the name of a module in that place.
const OF_SCRIPTS: [&str; 8] = [
    "kprobe",
    "k",
    "kretprobe",
    "kr",
    "fentry",
    "fexit",
    "kfunc",
    "kretfunc",
];

/// Checks that `name` is a module's name as the kernel writes it.
fn module_name(column: usize, name: &str) -> Result<(), ParseError> {
    if name.is_empty() {
        return error(
            column,
            "missing module before `:`; leave out the `:` or name it",
        );
    }
    if OF_SCRIPTS.contains(&name) {
        let message = format!(
            "`{name}:` is of scripts (-e); here a function's entry is `p FUNCTION`, its return `r FUNCTION`"
        );
        return error(column, message);
    }
    if let Some((i, c)) = name
        .char_indices()
        .find(|(_, c)| !(*c == '_' || c.is_ascii_alphanumeric()))
    {
        return error(
            column + i,
            match c {
                '-' => "the kernel has `_` where the file of a module has `-`".to_owned(),
                c => format!("`{c}` cannot be part of a module's name"),
            },
        );
    }
    if name.len() > LONGEST_MODULE {
        return error(
            column + LONGEST_MODULE,
            format!("name of a module longer than {LONGEST_MODULE} characters"),
        );
    }
    Ok(())
}

/// Number of digits of a kernel address.
const ADDRESS: usize = 16;

/// Parses `SYMBOL` or `SYMBOL+OFFSET`.
fn symbol(column: usize, word: &str) -> Result<(String, u64), ParseError> {
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        return error(column, "a symbol starts with no digit, an address with 0x");
    }
    let length = symbol_length(word);
    // Lists of symbols write addresses in this form. No symbol has such a name.
    let digits = &word[..length];
    if length == ADDRESS && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let message = format!("an address begins with 0x: write 0x{digits}");
        return error(column, message);
    }
    if length == 0 {
        return error(column, "a symbol or an address (0x...) belongs here");
    }
    if length > LONGEST_SYMBOL {
        return error(
            column + LONGEST_SYMBOL,
            format!("symbol longer than {LONGEST_SYMBOL} characters"),
        );
    }
    let (name, rest) = word.split_at(length);
    let at = column + length;
    let offset = match rest.split_at_checked(1) {
        None => 0,
        Some(("+", "")) => return error(at + 1, "missing offset after `+`"),
        Some(("+", digits)) => number(at + 1, digits, "offset")?,
        Some(("-", _)) => {
            return error(
                at,
                "an offset counts from the symbol's start and cannot be negative",
            );
        }
        Some((other, _)) => return error(at, format!("`{other}` cannot be part of a symbol")),
    };
    Ok((name.to_owned(), offset))
}

/// Parses a decimal or 0x number of at most 64 bits.
fn number(column: usize, word: &str, what: &str) -> Result<u64, ParseError> {
    if word.starts_with('-') {
        return error(
            column,
            "an offset counts from the symbol's start and cannot be negative",
        );
    }
    number_in(column, word, what, || {
        format!("missing digits of the {what}")
    })
}

/// Refuses a first argument that looks like a part of the target, or like a second target.
fn no_second_target(
    target: &Target,
    named: bool,
    column: usize,
    word: &str,
) -> Result<(), ParseError> {
    let message = match target {
        Target::Symbol { .. } | Target::Functions { .. } if strip_hex(word).is_some() => {
            "Invalid fetch argument; both a symbol and an address given: give one of them"
        }
        Target::Symbol { .. } if word.starts_with(['+', '-']) && !word.contains(['(', '=']) => {
            "Dereference needs a brace; an offset follows the symbol without a blank"
        }
        // If the event has a name, the word may be a named argument of the function at the address.
        Target::Address(_)
            if !named && symbol_length(word) == word.len() && !word.contains('$') =>
        {
            "both an address and a symbol given: give one of them"
        }
        _ => return Ok(()),
    };
    error(column, message)
}
