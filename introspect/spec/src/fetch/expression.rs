//! Parser of fetched expressions.
//!
//! The kernel splits the text from the outside in: a dereference ends at the last `)`, a variable at the first
//! `.` or `-`. This parser does the same, so that errors have the same columns.

use super::argument::{Access, Expr, ExprKind};
use super::number::{decimal, signed, unsigned};
use super::place::Place;
use super::registers;
use super::words;
use crate::column::Column;
use crate::parse_error::{ParseError, error};
use crate::symbol::symbol_length;

/// Maximum number of steps that fetch an argument, as in the kernel: `FETCH_INSN_MAX` in
/// kernel/trace/trace_probe.h, less one for the `FETCH_OP_END` at the end.
pub(super) const STEPS: usize = 15;
/// Highest number of a stack word and of an argument, as in the kernel (`PARAM_MAX_STACK` in
/// kernel/trace/trace_probe.c).
const MOST_WORDS: u64 = 2048;
/// Maximum nesting of casts, as in the kernel (`TRACEPROBE_MAX_NESTED_LEVEL`).
const CASTS: usize = 8;

/// Result of an expression, as far as it is known without types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gives {
    /// Number.
    Number,
    /// Address of the stack, of the current task or of a per-CPU variable.
    Address,
    /// Number that is written in the definition.
    Constant,
    /// Text without an address: the task's name, or a text in the definition.
    Text,
    /// Argument or result of the function. Its kind depends on its C type.
    Typed,
    /// Value in kernel memory.
    Memory,
    /// Value in user memory.
    UserMemory,
}

/// Parsed expression, with its cost and result.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) expr: Expr,
    pub(super) gives: Gives,
    /// Number of steps before the last one.
    pub(super) steps: usize,
}

/// Parser for the expressions of one argument.
#[derive(Debug)]
pub(super) struct Reader {
    place: Place,
    /// Number of casts around the current expression.
    casts: usize,
}

impl Reader {
    pub(super) fn new(place: Place) -> Self {
        Self { place, casts: 0 }
    }

    /// Parses all of `text`, which begins at `at`.
    pub(super) fn read(&mut self, at: usize, text: &str) -> Result<Read, ParseError> {
        let mut chars = text.chars();
        let first = chars.next();
        let rest = chars.as_str();
        match first {
            Some('$') => self.variable(at, rest),
            Some('%') => match registers::by_name(rest) {
                Some(register) => Ok(done(at, ExprKind::Register(register), Gives::Number, 0)),
                None => error(at, registers::unknown(rest)),
            },
            Some('@') => memory(at, rest),
            Some('+' | '-') => self.dereference(at, text),
            Some('\\') => constant(at, rest),
            Some('(') => self.cast(at, rest),
            Some(c) if c == '_' || c.is_ascii_alphabetic() => self.word(at, text),
            _ => error(at, words::BAD_FETCH_ARG),
        }
    }

    /// Parses the text after a `$`, which is at `at`.
    fn variable(&self, at: usize, text: &str) -> Result<Read, ParseError> {
        if text.starts_with("retval") {
            if !self.place.returns {
                return error(at, words::RETVAL_ON_PROBE);
            }
            let name = before_access(text);
            let path = path(at + 1 + name.len(), &text[name.len()..])?;
            if name != "retval" {
                return error(at, words::NO_BTFARG);
            }
            let gives = typed(&path);
            let steps = steps_of(&path);
            return Ok(done(at, ExprKind::Return { path }, gives, steps));
        }
        if let Some(rest) = text.strip_prefix("stack") {
            if rest.is_empty() {
                return Ok(done(at, ExprKind::Stack, Gives::Address, 0));
            }
            return match decimal(rest) {
                None => error(at, words::BAD_VAR),
                Some(word) if word > MOST_WORDS => error(at, words::BAD_STACK_NUM),
                Some(word) => {
                    let word = u16::try_from(word).unwrap_or(u16::MAX);
                    Ok(done(at, ExprKind::StackWord(word), Gives::Number, 0))
                }
            };
        }
        if matches!(text, "comm" | "COMM") {
            return Ok(done(at, ExprKind::Comm, Gives::Text, 0));
        }
        if let Some(rest) = text.strip_prefix("current") {
            if !(rest.is_empty() || rest.starts_with('-')) {
                return error(at, words::BAD_VAR);
            }
            let path = path(at + 1 + text.len() - rest.len(), rest)?;
            let gives = match path.is_empty() {
                true => Gives::Address,
                false => Gives::Memory,
            };
            let steps = steps_of(&path);
            return Ok(done(at, ExprKind::Current { path }, gives, steps));
        }
        let Some(rest) = text.strip_prefix("arg") else {
            return error(at, words::BAD_VAR);
        };
        if rest.starts_with('*') {
            return error(
                at,
                format!(
                    "{}; `$arg*` stands alone, without a name or a type",
                    words::BAD_VAR
                ),
            );
        }
        match decimal(rest) {
            None => error(at, words::BAD_VAR),
            Some(number @ 1..=MOST_WORDS) => {
                if !self.place.has_arguments() {
                    return error(at, words::NOFENTRY_ARGS);
                }
                let number = u16::try_from(number).unwrap_or(u16::MAX);
                Ok(done(at, ExprKind::Argument(number), Gives::Typed, 0))
            }
            Some(_) => error(at, format!("{}; the first is `$arg1`", words::BAD_ARG_NUM)),
        }
    }

    /// Parses `+8(ADDRESS)`, `-u8(ADDRESS)`.
    fn dereference(&mut self, at: usize, text: &str) -> Result<Read, ParseError> {
        let (sign, rest) = text.split_at(1);
        let (user, rest) = match rest.strip_prefix('u') {
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        let Some((number, inner)) = rest.split_once('(') else {
            return error(at, words::DEREF_NEED_BRACE);
        };
        let offset = match sign {
            "-" => signed(&format!("-{number}")),
            _ => signed(number),
        };
        let Some(offset) = offset else {
            return error(at, words::BAD_DEREF_OFFS);
        };
        let inner = self.in_braces(at + text.len() - inner.len(), inner)?;
        if inner.steps + 1 >= STEPS {
            return error(inner.expr.column.0, words::TOO_MANY_OPS);
        }
        let gives = match user {
            true => Gives::UserMemory,
            false => Gives::Memory,
        };
        let kind = ExprKind::Dereference {
            user,
            offset,
            inner: Box::new(inner.expr),
        };
        Ok(done(at, kind, gives, inner.steps + 1))
    }

    /// Parses an expression in parentheses. `text` begins at `at`, directly after the `(`. The expression ends at
    /// the last `)` in `text`.
    fn in_braces(&mut self, at: usize, text: &str) -> Result<Read, ParseError> {
        let Some((inner, behind)) = text.rsplit_once(')') else {
            return error(at + text.len(), words::DEREF_OPEN_BRACE);
        };
        let inner = self.read(at, inner)?;
        if inner.gives == Gives::Text {
            return error(at, words::COMM_CANT_DEREF);
        }
        if !behind.is_empty() {
            // The kernel ignores this text silently.
            return error(
                at + text.len() - behind.len(),
                format!(
                    "{}; nothing but a type can follow the last `)`",
                    words::BAD_FETCH_ARG
                ),
            );
        }
        Ok(inner)
    }

    /// Parses `NAME`, `NAME->MEMBER`, `this_cpu_read(ADDRESS)`.
    fn word(&mut self, at: usize, text: &str) -> Result<Read, ParseError> {
        for (prefix, read) in [("this_cpu_ptr(", false), ("this_cpu_read(", true)] {
            if let Some(inner) = text.strip_prefix(prefix) {
                return self.per_cpu(at, at + prefix.len(), inner, read);
            }
        }
        if !self.place.has_arguments() {
            return error(
                at,
                format!(
                    "{}; arguments have names at a function's entry only",
                    words::NOSUP_BTFARG
                ),
            );
        }
        let name = before_access(text);
        let rest = &text[name.len()..];
        let path = path(at + name.len(), rest)?;
        if !is_identifier(name) {
            return error(at, words::NO_BTFARG);
        }
        let gives = typed(&path);
        let steps = steps_of(&path);
        let name = name.to_owned();
        Ok(done(at, ExprKind::Variable { name, path }, gives, steps))
    }

    fn per_cpu(
        &mut self,
        at: usize,
        inner_at: usize,
        inner: &str,
        read: bool,
    ) -> Result<Read, ParseError> {
        let symbol = inner.starts_with('@');
        let inner = self.in_braces(inner_at, inner)?;
        // Only the address of a symbol is needed, so its last step, the read, is not counted.
        let steps = inner.steps + usize::from(!symbol) + usize::from(read);
        if steps >= STEPS {
            return error(inner_at, words::TOO_MANY_OPS);
        }
        let gives = match read {
            true => Gives::Memory,
            false => Gives::Address,
        };
        let inner = Box::new(inner.expr);
        Ok(done(at, ExprKind::PerCpu { read, inner }, gives, steps))
    }

    /// Parses `(STRUCT[,MEMBER])ADDRESS->MEMBER`; `text` follows the first `(`, which is at `at`.
    fn cast(&mut self, at: usize, text: &str) -> Result<Read, ParseError> {
        if !self.place.has_arguments() {
            return error(at, words::NOSUP_BTFARG);
        }
        if self.casts == CASTS {
            return error(at, words::TOO_MANY_NESTED);
        }
        let end = at + 1 + text.len();
        let Some((of, rest)) = text.split_once(')') else {
            return error(end, words::DEREF_OPEN_BRACE);
        };
        let rest_at = end - rest.len();
        let (inner_at, inner, fields) = cast_operand(rest_at, rest)?;
        self.casts += 1;
        let inner = self.read(inner_at, inner)?;
        self.casts -= 1;
        if inner.gives == Gives::Text {
            return error(inner_at, words::COMM_CANT_DEREF);
        }
        let (of, member) = cast_type(at + 1, of)?;
        let path = path(end - fields.len(), fields)?;
        let steps = inner.steps + steps_of(&path);
        if steps >= STEPS {
            return error(end - fields.len(), words::TOO_MANY_OPS);
        }
        let kind = ExprKind::Cast {
            of,
            member,
            inner: Box::new(inner.expr),
            path,
        };
        Ok(done(at, kind, Gives::Memory, steps))
    }
}

/// Splits the text after the `)` of a cast's type: returns the column of the operand, the operand, and the
/// accesses after it, which begin with an arrow.
fn cast_operand(at: usize, text: &str) -> Result<(usize, &str, &str), ParseError> {
    let is_read = ["+", "-", "this_cpu_ptr(", "this_cpu_read("]
        .iter()
        .any(|prefix| text.starts_with(prefix));
    if text.starts_with('(') || is_read {
        let Some(open) = text.find('(') else {
            return error(at, words::DEREF_NEED_BRACE);
        };
        let Some(close) = matching_brace(text, open) else {
            let column = if is_read { at + text.len() } else { at };
            return error(column, words::DEREF_OPEN_BRACE);
        };
        let (operand, fields) = text.split_at(close + 1);
        if !fields.starts_with("->") {
            return error(at + close + 1, words::TYPECAST_REQ_FIELD);
        }
        return Ok(match is_read {
            true => (at, operand, fields),
            false => (at + 1, &operand[1..close], fields),
        });
    }
    let arrow = text.find("->");
    let operand = &text[..arrow.unwrap_or(text.len())];
    let is_symbol = text.starts_with('@') && !text[1..].starts_with(|c: char| c.is_ascii_digit());
    if is_symbol && operand.contains(['+', '-']) {
        return error(at, words::TYPECAST_SYM_OFFSET);
    }
    match arrow {
        Some(arrow) if !operand.contains('-') => Ok((at, operand, &text[arrow..])),
        _ => error(at + text.len(), words::TYPECAST_REQ_FIELD),
    }
}

/// Parses the structure of a cast and, if it is given, the member whose address is cast.
fn cast_type(at: usize, text: &str) -> Result<(String, Option<String>), ParseError> {
    let (of, member) = match text.split_once(',') {
        Some((of, member)) => (of, Some(member)),
        None => (text, None),
    };
    if !is_identifier(of) {
        return error(
            at,
            format!(
                "{}; write the name of the structure alone: `(task_struct)`",
                words::NO_PTR_STRCT
            ),
        );
    }
    if let Some(member) = member {
        let at = at + of.len() + 1;
        if let Some(arrow) = member.find("->") {
            return error(at + arrow, words::TYPECAST_BAD_ARROW);
        }
        if let Some(hyphen) = member.find('-') {
            return error(at + hyphen, words::BAD_HYPHEN);
        }
        let mut at = at;
        for field in member.split('.') {
            if !is_identifier(field) {
                return error(at, words::NO_BTF_FIELD);
            }
            at += field.len() + 1;
        }
    }
    Ok((of.to_owned(), member.map(str::to_owned)))
}

/// Returns the position of the `)` that matches the `(` at `open`.
fn matching_brace(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (i, c) in text[open..].char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(open + i);
        }
    }
    None
}

/// Parses `@ADDRESS`, `@SYMBOL`, `@SYMBOL+OFFSET`; `text` follows the `@`, which is at `at`.
fn memory(at: usize, text: &str) -> Result<Read, ParseError> {
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return match unsigned(text) {
            Some(address) => Ok(done(at, ExprKind::Memory(address), Gives::Memory, 1)),
            None => error(at, words::BAD_MEM_ADDR),
        };
    }
    if text.starts_with('+') {
        return error(at, words::FILE_ON_KPROBE);
    }
    let end = text.find(['+', '-']).unwrap_or(text.len());
    let (name, offset) = text.split_at(end);
    let length = symbol_length(name);
    if name.is_empty() || length < name.len() {
        return error(
            at + 1 + length,
            format!(
                "{}; a symbol or an address belongs here",
                words::BAD_MEM_ADDR
            ),
        );
    }
    let offset = match offset {
        "" => Some(0),
        offset => signed(offset),
    };
    let Some(offset) = offset else {
        return error(
            at + 1 + length,
            format!("{}; bad offset of the symbol", words::BAD_MEM_ADDR),
        );
    };
    let name = name.to_owned();
    Ok(done(
        at,
        ExprKind::Symbol { name, offset },
        Gives::Memory,
        2,
    ))
}

/// Parses `\NUMBER`, `\"TEXT"`; `text` follows the `\`, which is at `at`.
fn constant(at: usize, text: &str) -> Result<Read, ParseError> {
    if let Some(quoted) = text.strip_prefix('"') {
        return match quoted.strip_suffix('"') {
            Some(quoted) => {
                let kind = ExprKind::Text(quoted.to_owned());
                Ok(done(at, kind, Gives::Text, 0))
            }
            None => error(at + 2 + quoted.len(), words::IMMSTR_NO_CLOSE),
        };
    }
    let number = match text.chars().next() {
        Some('0'..='9') => unsigned(text),
        Some('-') => signed(text).map(i64::cast_unsigned),
        Some('+') => signed(&text[1..]).map(i64::cast_unsigned),
        _ => None,
    };
    match number {
        Some(number) => Ok(done(at, ExprKind::Immediate(number), Gives::Constant, 0)),
        None => error(at + 1, words::BAD_IMM),
    }
}

/// Parses `->MEMBER.MEMBER->MEMBER`, or nothing.
fn path(at: usize, text: &str) -> Result<Vec<Access>, ParseError> {
    let end = at + text.len();
    let mut path = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = end - rest.len();
        let (arrow, behind) = match (rest.strip_prefix("->"), rest.strip_prefix('.')) {
            (Some(behind), _) => (true, behind),
            (None, Some(_)) if path.is_empty() => return error(at + 1, words::NOSUP_DAT_ARG),
            (None, Some(behind)) => (false, behind),
            (None, None) => return error(at, words::BAD_HYPHEN),
        };
        let field = before_access(behind);
        let column = end - behind.len();
        rest = &behind[field.len()..];
        if !is_identifier(field) {
            return error(column, words::NO_BTF_FIELD);
        }
        path.push(Access {
            column: Column(column),
            arrow,
            field: field.to_owned(),
        });
    }
    Ok(path)
}

/// Returns the name before the first access in `text`.
fn before_access(text: &str) -> &str {
    &text[..text.find(['.', '-']).unwrap_or(text.len())]
}

/// Returns whether `text` is an identifier of C.
pub(super) fn is_identifier(text: &str) -> bool {
    !text.starts_with(|c: char| c.is_ascii_digit())
        && !text.is_empty()
        && text.bytes().all(|b| b == b'_' || b.is_ascii_alphanumeric())
}

/// Returns the kind of value to which the accesses of `path` lead from an argument or the result of the function.
fn typed(path: &[Access]) -> Gives {
    match path.is_empty() {
        true => Gives::Typed,
        false => Gives::Memory,
    }
}

/// Returns the number of memory reads on a path.
fn steps_of(path: &[Access]) -> usize {
    path.iter().filter(|access| access.arrow).count()
}

fn done(at: usize, kind: ExprKind, gives: Gives, steps: usize) -> Read {
    Read {
        expr: Expr {
            column: Column(at),
            kind,
        },
        gives,
        steps,
    }
}
