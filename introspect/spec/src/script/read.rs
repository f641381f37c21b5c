//! Parser of scripts.

use super::cursor::Cursor;
use super::format::{Conversion, Directive, read_format};
use super::read_condition::read_condition;
use super::read_config::read_config;
use super::read_operand::{read_map, read_thread, read_value};
use super::syntax::{
    Builtin, Clause, Fetched, Gather, MapFunction, Operand, OperandKind, Point, PointKind, Script,
    Statement, StatementKind,
};
use crate::column::Column;
use crate::definition::FileError;
use crate::histogram::KEYS_MAX;
use crate::number::number_in;
use crate::parse_error::{ParseError, error, quoted};

/// Maximum length of a script in bytes.
pub const SCRIPT_MAX: usize = 1 << 16;
/// Maximum number of clauses of a script, and of probes and statements of a clause.
const MANY: usize = 256;
/// Maximum number of values of a `printf`.
const VALUES_MAX: usize = 16;
/// Maximum length of an interval in milliseconds.
const INTERVAL_MAX: u64 = 86_400_000;
/// Maximum number of steps of `lhist`, as in bpftrace.
const STEPS_MAX: u64 = 1000;

/// Message about the values that can be assigned to a map.
const GATHERED: &str = "a map is assigned count(), sum(x), avg(x), min(x), max(x), hist(x) or lhist(x, MIN, MAX, STEP)";
/// Message about texts in a map.
const KEPT: &str = "not supported: texts, names and stacks in a map, which has numbers; make it a key: @[func] = count()";
/// Message about the supported statements.
const STATEMENTS: &str =
    "there are `@MAP[KEYS] = count()` and the like, printf, print, clear, delete, time and exit";

/// Parses a script.
///
/// # Errors
/// Returns the line and the reason if the text is not a script that can be compiled.
pub fn read_script(text: &str) -> Result<Script, FileError> {
    read(text).map_err(|error| in_line(text, error))
}

/// Converts `error`, whose column counts in all of `text`, to an error in its line.
#[must_use]
pub fn in_line(text: &str, error: ParseError) -> FileError {
    let mut left = error.column;
    let mut last = (1, "", 0);
    for (number, line) in (1..).zip(text.split('\n')) {
        let length = line.chars().count();
        last = (number, line, length);
        if left <= length {
            break;
        }
        left -= length + 1;
    }
    let (number, line, length) = last;
    FileError {
        number,
        text: line.to_owned(),
        source: ParseError {
            column: left.min(length),
            message: error.message,
        },
    }
}

fn read(text: &str) -> Result<Script, ParseError> {
    if text.len() > SCRIPT_MAX {
        return error(0, format!("a script has at most {} KiB", SCRIPT_MAX >> 10));
    }
    let mut cursor = Cursor::new(text);
    let mut script = Script::default();
    cursor.blanks()?;
    while cursor.peek().is_some() {
        if script.clauses.len() == MANY {
            return cursor.error(format!("a script has at most {MANY} clauses"));
        }
        read_config(&mut cursor)?;
        script.clauses.push(read_clause(&mut cursor)?);
        cursor.blanks()?;
    }
    match script.clauses.is_empty() {
        true => cursor.error("an empty script: write `kprobe:vfs_read { @[comm] = count(); }`"),
        false => Ok(script),
    }
}

fn read_clause(cursor: &mut Cursor) -> Result<Clause, ParseError> {
    let mut points = Vec::new();
    loop {
        if points.len() == MANY {
            return cursor.error(format!("a clause has at most {MANY} probes"));
        }
        points.push(read_point(cursor)?);
        cursor.blanks()?;
        if !cursor.eat(",") {
            break;
        }
        cursor.blanks()?;
    }
    let condition = match cursor.sees("/") {
        true => {
            let column = cursor.at();
            let asked = points
                .iter()
                .find(|point| !matches!(point.kind, PointKind::Function { .. }));
            if asked.is_some() {
                return error(
                    column,
                    "a condition belongs to kprobe and kretprobe: leave it out",
                );
            }
            Some(read_condition(cursor)?)
        }
        false => None,
    };
    cursor.blanks()?;
    let opened = cursor.at();
    cursor.expect("{", "`{` and what is to be done belong here")?;
    let mut statements = Vec::new();
    loop {
        cursor.blanks()?;
        if cursor.eat(";") {
            continue;
        }
        if cursor.eat("}") {
            break;
        }
        if cursor.peek().is_none() {
            return error(opened, "this clause has no end: missing `}`");
        }
        if statements.len() == MANY {
            return cursor.error(format!("a clause has at most {MANY} statements"));
        }
        statements.push(read_statement(cursor)?);
        cursor.blanks()?;
        if !cursor.sees("}") {
            cursor.expect(";", "`;` or `}` belongs here")?;
        }
    }
    Ok(Clause {
        points,
        condition,
        statements,
    })
}

fn read_point(cursor: &mut Cursor) -> Result<Point, ParseError> {
    let start = cursor.at();
    let column = Column(start);
    let word = cursor.word();
    let kind = match word.as_str() {
        "BEGIN" | "begin" => PointKind::Begin,
        "END" | "end" => PointKind::End,
        "interval" | "i" => read_interval(cursor)?,
        "kprobe" | "k" | "kretprobe" | "kr" => {
            cursor.expect(":", "`:FUNCTION` belongs here")?;
            let column = Column(cursor.at());
            let target = cursor.take(|c| !(c.is_whitespace() || ",{}/;\"".contains(c)));
            if target.is_empty() {
                return error(
                    column.0,
                    "the name of a function, or a pattern, belongs here",
                );
            }
            PointKind::Function {
                returns: word.starts_with("kr"),
                column,
                target,
            }
        }
        "" => {
            return error(
                start,
                "a probe belongs here: BEGIN, END, interval:s:N, kprobe:FUNC or kretprobe:FUNC",
            );
        }
        "struct" | "union" | "enum" | "typedef" => {
            let message = format!(
                "not supported: `{word}`; leave it out, the types of the guest's kernel are known: args.NAME->MEMBER"
            );
            return error(start, message);
        }
        other => {
            let instead = match other {
                "fentry" | "kfunc" | "f" => "write kprobe:FUNC, where args.NAME can be had, too",
                "fexit" | "kretfunc" | "fr" => {
                    "write kretprobe:FUNC, where args.NAME can be had, too"
                }
                "tracepoint" | "t" | "rawtracepoint" | "rt" => {
                    "write kprobe:FUNC; for system calls kprobe:__x64_sys_NAME and its args.NAME"
                }
                _ => "there are BEGIN, END, interval, kprobe and kretprobe",
            };
            return error(
                start,
                format!("not supported: probes of {}; {instead}", quoted(other)),
            );
        }
    };
    Ok(Point { column, kind })
}

fn read_interval(cursor: &mut Cursor) -> Result<PointKind, ParseError> {
    const LENGTH: &str = "length of the interval";

    cursor.expect(":", "`:s:N` or `:ms:N` belongs here")?;
    let start = cursor.at();
    let word = cursor.word();
    let unit = word.trim_start_matches(|c: char| c.is_ascii_digit());
    let scale = match unit {
        "s" => 1000,
        "ms" => 1,
        _ => return error(start, "an interval is s:N or ms:N: seconds or milliseconds"),
    };
    // Newer versions of bpftrace write `5s` for `s:5`.
    let (at, number) = match word.strip_suffix(unit).filter(|digits| !digits.is_empty()) {
        Some(digits) => (start, number_in(start, digits, LENGTH, String::new)?),
        None => {
            cursor.expect(":", "`:N` belongs here")?;
            (cursor.at(), cursor.number(LENGTH)?)
        }
    };
    let length = number.saturating_mul(scale);
    match (1..=INTERVAL_MAX).contains(&length) {
        true => Ok(PointKind::Interval(length)),
        false => error(at, "an interval is between 1 ms and a day"),
    }
}

fn read_statement(cursor: &mut Cursor) -> Result<Statement, ParseError> {
    let start = cursor.at();
    let column = Column(start);
    let kind = match cursor.peek() {
        Some('@') => read_gather(cursor)?,
        Some('$') => {
            return cursor
                .error("not supported: variables; write what they stand for where it is used");
        }
        _ => {
            let word = cursor.word();
            cursor.blanks()?;
            read_call(cursor, start, &word)?
        }
    };
    Ok(Statement { column, kind })
}

fn read_gather(cursor: &mut Cursor) -> Result<StatementKind, ParseError> {
    let map = read_map(cursor)?;
    let keys = match cursor.eat("[") {
        true => {
            cursor.blanks()?;
            read_values(cursor, "]", KEYS_MAX - 1, "keys")?
        }
        false => Vec::new(),
    };
    cursor.blanks()?;
    if cursor.sees("++") {
        return cursor.error("not supported: `++`; write `= count()`");
    }
    if cursor.sees("==") || !cursor.eat("=") {
        return cursor.error(format!("`=` belongs here; {GATHERED}"));
    }
    cursor.blanks()?;
    let start = cursor.at();
    if cursor.sees("\"") {
        return error(start, KEPT);
    }
    let word = cursor.word();
    cursor.blanks()?;
    let is_thread = |keys: &[Operand]| {
        let thread = OperandKind::Builtin(Builtin::Tid);
        matches!(keys, [key] if key.kind == thread)
    };
    if word == "nsecs" && is_thread(&keys) {
        return Ok(StatementKind::Keep { map });
    }
    let is_known = ["count", "sum", "avg", "min", "max", "hist", "lhist"].contains(&word.as_str());
    if !is_known || !cursor.eat("(") {
        let message = match word.as_str() {
            "nsecs" | "elapsed" => {
                "not supported: keeping times but as @NAME[tid] = nsecs; how long a call took is \
                 `duration` in kretprobe:FUNC { ... }"
                    .to_owned()
            }
            "comm" | "func" | "probe" | "kstack" | "str" | "ksym" => KEPT.to_owned(),
            "stats" => "not supported: stats(); write count() and avg() of two maps".to_owned(),
            _ => GATHERED.to_owned(),
        };
        return error(start, message);
    }
    cursor.blanks()?;
    let what = read_gathered(cursor, start, &word)?;
    cursor.expect(")", &format!("`)` belongs here: {}", form(&word)))?;
    cursor.blanks()?;
    Ok(StatementKind::Gather { map, keys, what })
}

/// Returns the syntax of a call of the function `word`.
fn form(word: &str) -> String {
    match word {
        "count" => "count()".to_owned(),
        "lhist" => "lhist(x, MIN, MAX, STEP)".to_owned(),
        word => format!("{word}(x)"),
    }
}

/// Parses the arguments of the function `word`, which begins at `start`.
fn read_gathered(cursor: &mut Cursor, start: usize, word: &str) -> Result<Gather, ParseError> {
    if word == "count" {
        return Ok(Gather {
            aggregate: MapFunction::Hits,
            of: None,
        });
    }
    let of = read_value(cursor)?;
    if of.kind.is_literal() {
        return error(of.column.0, "this is always the same: write count()");
    }
    if of.kind.is_text() {
        return error(of.column.0, format!("{word}() is of a number"));
    }
    let aggregate = match word {
        "sum" => MapFunction::Sum,
        "avg" => MapFunction::Average,
        "min" => MapFunction::Least,
        "max" => MapFunction::Greatest,
        "hist" => MapFunction::Powers,
        _ => {
            let mut number = |what| {
                cursor.expect(",", "lhist is written lhist(x, MIN, MAX, STEP)")?;
                cursor.blanks()?;
                let at = cursor.at();
                if cursor.sees("-") {
                    return error(
                        at,
                        "not supported: steps below 0; what is less stands in the first row",
                    );
                }
                let number = cursor.number(what)?;
                cursor.blanks()?;
                Ok((at, number))
            };
            let (_, min) = number("lower bound")?;
            let (max_at, max) = number("upper bound")?;
            let (step_at, step) = number("step")?;
            // The values of rows are signed numbers.
            if max <= min || max > u64::MAX >> 1 {
                return error(
                    max_at,
                    "the upper bound is more than the lower one, and a signed number",
                );
            }
            if step == 0 || (max - min) % step != 0 || min % step != 0 {
                return error(step_at, "both bounds are multiples of the step");
            }
            if (max - min) / step > STEPS_MAX {
                return error(start, format!("lhist has at most {STEPS_MAX} steps"));
            }
            MapFunction::Steps { min, max, step }
        }
    };
    Ok(Gather {
        aggregate,
        of: Some(of),
    })
}

/// Parses a comma-separated list of at most `most` values, and `close` after it. `what` names the values in
/// messages.
fn read_values(
    cursor: &mut Cursor,
    close: &str,
    most: usize,
    what: &str,
) -> Result<Vec<Operand>, ParseError> {
    let mut values = Vec::new();
    loop {
        if values.len() == most {
            return cursor.error(format!("at most {most} {what}"));
        }
        values.push(read_value(cursor)?);
        if cursor.eat(close) {
            return Ok(values);
        }
        cursor.expect(",", &format!("`,` or `{close}` belongs here"))?;
        cursor.blanks()?;
    }
}

/// Parses a call of `word`, which begins at `start`.
fn read_call(cursor: &mut Cursor, start: usize, word: &str) -> Result<StatementKind, ParseError> {
    let refuse = |what: &str| error(start, format!("not supported: {what}; {STATEMENTS}"));
    match word {
        "" => return error(start, format!("a statement belongs here; {STATEMENTS}")),
        "if" | "else" | "unless" => {
            return refuse("`if`: write a clause with /CONDITION/ for each case");
        }
        "while" | "for" | "unroll" | "let" | "return" | "break" | "continue" => {
            return refuse(&format!("`{word}`"));
        }
        "printf" | "print" | "clear" | "delete" | "time" | "exit" => {}
        "zero" => return refuse("zero(): write clear()"),
        word => return refuse(&quoted(word).to_string()),
    }
    cursor.expect("(", "`(` belongs here")?;
    cursor.blanks()?;
    let kind = match word {
        "printf" => return read_printf(cursor),
        "print" => {
            let map = read_of_all(cursor, "print")?;
            let top = match cursor.eat(",") {
                true => {
                    cursor.blanks()?;
                    let at = cursor.at();
                    match cursor.number("number of entries")? {
                        0 => return error(at, "how many entries: at least 1"),
                        top => Some(top),
                    }
                }
                false => None,
            };
            cursor.blanks()?;
            if cursor.sees(",") {
                return cursor.error("not supported: dividing what is printed; leave it out");
            }
            StatementKind::Print { map, top }
        }
        "delete" => {
            let map = read_map(cursor)?;
            let opened = cursor.sees("[") || cursor.sees(",");
            match opened {
                true => {
                    read_thread(cursor)?;
                    StatementKind::Forget { map }
                }
                false => StatementKind::Clear { map },
            }
        }
        "clear" => StatementKind::Clear {
            map: read_of_all(cursor, word)?,
        },
        "time" => match cursor.sees(")") {
            true => StatementKind::Time("%H:%M:%S\n".to_owned()),
            false => StatementKind::Time(read_time(cursor)?),
        },
        _ => StatementKind::Exit,
    };
    cursor.expect(")", "`)` belongs here")?;
    Ok(kind)
}

/// Parses a map without keys, as the argument of the function `word`, which applies to all entries of the map.
fn read_of_all(cursor: &mut Cursor, word: &str) -> Result<String, ParseError> {
    let map = read_map(cursor)?;
    match cursor.sees("[") {
        true => cursor.error(format!(
            "not supported: {word}() of a single entry; leave out the key for all of them"
        )),
        false => Ok(map),
    }
}

fn read_time(cursor: &mut Cursor) -> Result<String, ParseError> {
    if !cursor.sees("\"") {
        return cursor.error("a format belongs here: time(\"%H:%M:%S\\n\")");
    }
    let quoted = cursor.quoted()?;
    let mut characters = quoted.characters.iter();
    while let Some((at, c)) = characters.next() {
        let is_known = |(_, c): &(usize, char)| "HMSFTYmdjs%".contains(*c);
        if *c == '%' && !characters.next().is_some_and(is_known) {
            return error(*at, "there are %H %M %S %T %Y %m %d %F %j %s and %%");
        }
    }
    cursor.blanks()?;
    Ok(quoted.text())
}

fn read_printf(cursor: &mut Cursor) -> Result<StatementKind, ParseError> {
    if !cursor.sees("\"") {
        return cursor.error("a format belongs here: printf(\"FORMAT\", VALUES)");
    }
    let start = cursor.at();
    let quoted = cursor.quoted()?;
    let format = read_format(&quoted.characters, quoted.end)?;
    cursor.blanks()?;
    let values = match cursor.eat(",") {
        true => {
            cursor.blanks()?;
            read_values(cursor, ")", VALUES_MAX, "values")?
        }
        false => {
            cursor.expect(")", "`,` or `)` belongs here")?;
            Vec::new()
        }
    };
    let wanted = format.directives().count();
    if wanted != values.len() {
        let at = values.get(wanted).map_or(start, |value| value.column.0);
        let message = format!(
            "the format has {wanted} directives for {} values",
            values.len()
        );
        return error(at, message);
    }
    for (directive, value) in format.directives().zip(&values) {
        check_printed(directive, value)?;
    }
    Ok(StatementKind::Printf { format, values })
}

/// Returns an error if `directive` cannot print the value.
fn check_printed(directive: &Directive, value: &Operand) -> Result<(), ParseError> {
    let kind = &value.kind;
    let letter = directive.conversion.letter();
    // A named argument may be a text or a number: that depends on the guest's types.
    let may_be_both = matches!(kind, OperandKind::Fetched(Fetched::Named(_)));
    match (directive.conversion, kind.is_text()) {
        (Conversion::Text, false) if !may_be_both => {
            let message =
                format!("%{letter} prints a text, and this is a number: write %d, or str()");
            error(value.column.0, message)
        }
        (Conversion::Text, _) | (_, false) => Ok(()),
        (_, true) => {
            let message = format!("%{letter} prints a number, and this is a text: write %s");
            error(value.column.0, message)
        }
    }
}
