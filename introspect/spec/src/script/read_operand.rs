//! Parser of values.

use std::num::NonZeroU64;

use super::cursor::Cursor;
use super::syntax::{BUILTINS, Builtin, Fetched, Operand, OperandKind};
use crate::column::Column;
use crate::errno;
use crate::fetch::{OPERATORS, Operator};
use crate::parse_error::{ParseError, bounded, error, quoted};

/// Maximum number of arguments of a function: those that are passed in registers.
const ARGUMENTS: u16 = 6;
/// Maximum length of a path after `args.`
const PATH_MAX: usize = 200;

/// Maximum length of a map's name.
const NAME_MAX: usize = 63;

/// Message that refuses arithmetic.
pub(super) const NO_ARITHMETIC: &str = "not supported: calculating with values, but for dividing one by a number where it is counted or printed";
/// Message that refuses parentheses, because they would be part of a cast or a calculation.
pub(super) const CALCULATING: &str = "not supported: casts and calculating; write the value alone";
/// List of all values, for messages.
pub(super) const VALUES: &str = "there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, \
     args.NAME, retval, duration, str() and ksym()";

/// Returns the operators: those of filters, except for pattern matching.
pub(super) fn operators() -> impl Iterator<Item = &'static (Operator, &'static str)> {
    let all = OPERATORS.iter();
    all.filter(|(operator, _)| *operator != Operator::Glob)
}

/// Parses a value and the blanks after it. Division by a number is the only arithmetic.
pub(super) fn read_value(cursor: &mut Cursor) -> Result<Operand, ParseError> {
    let column = Column(cursor.at());
    let is_inside = cursor.sees("(nsecs") && cursor.eat("(");
    let mut operand = read_operand(cursor)?;
    if is_inside {
        cursor.expect(")", "`)` belongs here")?;
        cursor.blanks()?;
        operand.column = column;
    }
    if cursor.sees("/") {
        operand.kind = read_divided(cursor, operand.kind, is_inside)?;
    }
    no_arithmetic(cursor)?;
    let comparison = operators().any(|(_, sign)| cursor.sees(sign));
    if comparison || cursor.sees("||") || cursor.sees("?") {
        return cursor.error(
            "not supported: comparing here; write the condition before the clause: /CONDITION/ { ... }",
        );
    }
    Ok(operand)
}

/// Parses the `/` that comes next, the number after it, and the blanks after that. `of` is the dividend, and
/// `is_inside` says whether it is in parentheses.
fn read_divided(
    cursor: &mut Cursor,
    of: OperandKind,
    is_inside: bool,
) -> Result<OperandKind, ParseError> {
    let at = cursor.at();
    match of {
        OperandKind::Since(ref map) if !is_inside => {
            return error(at, format!("write (nsecs - @{map}[tid]) / NUMBER"));
        }
        ref of if of.is_literal() || of.is_text() || matches!(of, OperandKind::Ksym(_)) => {
            return error(at, "only numbers that hits have can be divided");
        }
        _ => {}
    }
    cursor.eat("/");
    cursor.blanks()?;
    let at = cursor.at();
    if !cursor.peek().is_some_and(|c| c.is_ascii_digit()) {
        return error(at, "not supported: dividing by anything but a number");
    }
    let Some(by) = NonZeroU64::new(cursor.number("number")?) else {
        return error(at, "nothing can be divided by 0");
    };
    cursor.blanks()?;
    let of = Box::new(of);
    Ok(OperandKind::Divided { of, by })
}

/// Parses a value without division, and the blanks after it.
pub(super) fn read_operand(cursor: &mut Cursor) -> Result<Operand, ParseError> {
    let column = Column(cursor.at());
    let kind = match cursor.peek() {
        Some('"') => OperandKind::Text(cursor.quoted()?.text()),
        Some('0'..='9' | '-') => OperandKind::Number(read_signed(cursor)?),
        Some('@') => {
            return cursor.error(
                "not supported: maps as values; of a call that returns, `duration` is the time it took",
            );
        }
        Some('$') => {
            return cursor
                .error("not supported: variables and parameters; write what they stand for");
        }
        Some('(') => {
            return cursor.error(CALCULATING);
        }
        Some('*') => {
            return cursor.error(
                "not supported: following a pointer so; write args.NAME->MEMBER, or str() of a text",
            );
        }
        _ => read_named(cursor)?,
    };
    cursor.blanks()?;
    if kind == OperandKind::Builtin(Builtin::Nsecs) && cursor.sees("-") {
        let at = cursor.at();
        cursor.eat("-");
        cursor.blanks()?;
        if !cursor.sees("@") {
            return error(at, NO_ARITHMETIC);
        }
        let map = read_kept(cursor)?;
        let kind = OperandKind::Since(map);
        return Ok(Operand { column, kind });
    }
    Ok(Operand { column, kind })
}

/// Parses `@NAME` and the blanks after it. Returns the name.
pub(super) fn read_map(cursor: &mut Cursor) -> Result<String, ParseError> {
    cursor.expect("@", "a map belongs here: @NAME")?;
    let at = cursor.at();
    let name = cursor.word();
    if name.len() > NAME_MAX {
        return error(
            at,
            format!("the name of a map has at most {NAME_MAX} characters"),
        );
    }
    cursor.blanks()?;
    Ok(name)
}

/// Parses `@NAME[tid]` and the blanks after it. Returns the name.
pub(super) fn read_kept(cursor: &mut Cursor) -> Result<String, ParseError> {
    let map = read_map(cursor)?;
    read_thread(cursor)?;
    Ok(map)
}

/// Parses `[tid]` or `, tid`, and the blanks after it.
pub(super) fn read_thread(cursor: &mut Cursor) -> Result<(), ParseError> {
    const ONLY: &str =
        "not supported: single entries of maps, but for `@NAME[tid]`, when a call began";

    let is_listed = cursor.eat(",");
    if !is_listed {
        cursor.expect("[", ONLY)?;
    }
    cursor.blanks()?;
    let at = cursor.at();
    if cursor.word() != "tid" {
        return error(at, ONLY);
    }
    cursor.blanks()?;
    if !is_listed {
        cursor.expect("]", ONLY)?;
        cursor.blanks()?;
    }
    Ok(())
}

fn read_signed(cursor: &mut Cursor) -> Result<i64, ParseError> {
    let start = cursor.at();
    let negative = cursor.eat("-");
    if negative && cursor.peek().is_some_and(|c| c.is_ascii_alphabetic()) {
        let name = cursor.word();
        return match errno::number(&name) {
            Some(number) => Ok(-i64::from(number)),
            None => error(start, format!("no error is called {}", quoted(&name))),
        };
    }
    let number = cursor.number("number")?;
    let number = match negative {
        true => 0_i64.checked_sub_unsigned(number),
        // Addresses are written as unsigned numbers.
        false => Some(number.cast_signed()),
    };
    number.map_or_else(|| error(start, "the number does not fit 64 bits"), Ok)
}

/// Parses a value with a name, or a call.
fn read_named(cursor: &mut Cursor) -> Result<OperandKind, ParseError> {
    let start = cursor.at();
    let word = cursor.word();
    if word.is_empty() {
        return error(start, format!("a value belongs here; {VALUES}"));
    }
    if let Some((builtin, _)) = BUILTINS.iter().find(|(_, name)| *name == word) {
        if cursor.sees("(") {
            return cursor.error(format!("not supported: `{word}` with something in ()"));
        }
        return Ok(OperandKind::Builtin(*builtin));
    }
    match word.as_str() {
        "str" | "ksym" => {
            let of = read_address(cursor, &word)?;
            return Ok(match word.as_str() {
                "str" => OperandKind::Str(of),
                _ => OperandKind::Ksym(of),
            });
        }
        _ => {}
    }
    match read_fetched(cursor, start, &word)? {
        Some(fetched) => Ok(OperandKind::Fetched(fetched)),
        None if cursor.sees("(") => {
            let message = format!("not supported: the function {}(); {VALUES}", bounded(&word));
            error(start, message)
        }
        None => no_value(start, &word),
    }
}

/// Refuses `word`, which begins at `start`, as a value.
pub(super) fn no_value<T>(start: usize, word: &str) -> Result<T, ParseError> {
    error(start, format!("{} is no value; {VALUES}", quoted(word)))
}

/// Returns whether `word` begins a value.
pub(super) fn begins_value(word: &str) -> bool {
    let is_argument =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    BUILTINS.iter().any(|(_, name)| *name == word)
        || ["str", "ksym", "retval", "curtask", "args"].contains(&word)
        || word.strip_prefix("arg").is_some_and(is_argument)
}

/// Parses the argument of `function`, which is an address in parentheses.
fn read_address(cursor: &mut Cursor, function: &str) -> Result<Fetched, ParseError> {
    cursor.blanks()?;
    cursor.expect("(", "`(` belongs here")?;
    cursor.blanks()?;
    let start = cursor.at();
    let word = cursor.word();
    let Some(fetched) = read_fetched(cursor, start, &word)? else {
        let message =
            format!("{function}() is of an address: arg0 to arg5, args.NAME, retval or curtask");
        return error(start, message);
    };
    cursor.blanks()?;
    no_arithmetic(cursor)?;
    if cursor.sees(",") {
        return cursor.error(format!(
            "not supported: {function}() with a second value; leave it out"
        ));
    }
    cursor.expect(")", "`)` belongs here")?;
    Ok(fetched)
}

/// Parses `word`, which begins at `start`, as a fetched value; returns `None` if it is none.
fn read_fetched(
    cursor: &mut Cursor,
    start: usize,
    word: &str,
) -> Result<Option<Fetched>, ParseError> {
    match word {
        "retval" => return Ok(Some(Fetched::Return)),
        "curtask" => return Ok(Some(Fetched::CurrentTask)),
        "args" => return read_path(cursor).map(Some),
        _ => {}
    }
    let Some(digits) = word.strip_prefix("arg").filter(|_| begins_value(word)) else {
        return Ok(None);
    };
    match digits.parse() {
        Ok(number) if number < ARGUMENTS => Ok(Some(Fetched::Argument(number))),
        _ => error(
            start,
            "there are arg0 to arg5: what a function is passed in registers",
        ),
    }
}

/// Parses `.NAME`, followed by members.
fn read_path(cursor: &mut Cursor) -> Result<Fetched, ParseError> {
    let mut path = String::new();
    loop {
        let sign = match () {
            () if cursor.eat("->") => "->",
            () if cursor.eat(".") => ".",
            () if path.is_empty() => {
                return cursor.error("not supported: all arguments together; write args.NAME");
            }
            () => return Ok(Fetched::Named(path)),
        };
        if !path.is_empty() {
            path.push_str(sign);
        }
        let start = cursor.at();
        let name = cursor.word();
        if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
            return error(start, "the name of an argument or of a member belongs here");
        }
        path.push_str(&name);
        if path.len() > PATH_MAX {
            return error(start, format!("at most {PATH_MAX} characters behind args"));
        }
    }
}

/// Returns an error if an arithmetic operator comes next.
pub(super) fn no_arithmetic(cursor: &Cursor) -> Result<(), ParseError> {
    let signs = ["+", "-", "*", "/", "%", "<<", ">>", "^"];
    match signs.iter().any(|sign| cursor.sees(sign)) {
        true => cursor.error(NO_ARITHMETIC),
        false => Ok(()),
    }
}
