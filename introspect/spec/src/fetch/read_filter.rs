//! Parser of filters.

use super::filter::{Filter, Form, Operator, Test, Value};
use super::number::{decimal, signed, unsigned};
use super::words::filter as words;
use crate::column::Column;
use crate::cursor::{Cursor, unprintable};
use crate::parse_error::{ParseError, error};
use crate::symbol::symbol_length;

/// Maximum number of comparisons in a filter.
pub const TERMS_MAX: usize = 64;
/// Maximum length of a text to compare with, as in the kernel (`MAX_FILTER_STR_VAL` less the final NUL).
pub const OPERAND_MAX: usize = 255;
/// Maximum nesting of parentheses and `!`.
const DEPTH: usize = 32;

/// Operators. An operator that is a prefix of another one comes after it.
pub(crate) const OPERATORS: [(Operator, &str); 8] = [
    (Operator::Glob, "~"),
    (Operator::NotEqual, "!="),
    (Operator::Equal, "=="),
    (Operator::LessOrEqual, "<="),
    (Operator::Less, "<"),
    (Operator::GreaterOrEqual, ">="),
    (Operator::Greater, ">"),
    (Operator::AnyBit, "&"),
];

impl Operator {
    /// Returns the operator as written.
    #[must_use]
    pub fn sign(self) -> &'static str {
        let found = OPERATORS.iter().find(|(known, _)| *known == self);
        found.map_or("", |(_, sign)| sign)
    }
}

/// Parses a filter, which is one line of ASCII.
///
/// # Errors
/// Returns the column and the reason if the text is not a filter.
pub fn read_filter(text: &str) -> Result<Filter, ParseError> {
    if let Some((column, c)) = unprintable(text) {
        return error(column, format!("{c:?}: a filter is one line of ASCII"));
    }
    read_at(0, text)
}

/// Parses `text`, which is ASCII and begins at `column`.
pub(crate) fn read_at(column: usize, text: &str) -> Result<Filter, ParseError> {
    let mut reader = Reader {
        cursor: Cursor::new(column, text),
        terms: 0,
        depth: 0,
    };
    reader.cursor.blanks();
    if reader.cursor.rest().is_empty() {
        return reader.cursor.error(words::NO_FILTER);
    }
    let filter = reader.alternatives()?;
    if reader.cursor.rest().starts_with(')') {
        return reader.cursor.error(words::TOO_MANY_CLOSE);
    }
    if !reader.cursor.rest().is_empty() {
        return reader.cursor.error(format!(
            "{}; `&&` or `||` belongs here",
            words::TOO_MANY_PREDS
        ));
    }
    Ok(filter)
}

/// Parser at a position in the text of a filter.
struct Reader<'a> {
    cursor: Cursor<'a>,
    terms: usize,
    depth: usize,
}

impl Reader<'_> {
    /// Skips `what` and the blanks after it, if it comes next.
    fn eat(&mut self, what: &str) -> bool {
        let found = self.cursor.eat(what);
        if found {
            self.cursor.blanks();
        }
        found
    }

    fn alternatives(&mut self) -> Result<Filter, ParseError> {
        let mut filter = self.conditions()?;
        while self.eat("||") {
            filter = Filter::Or(Box::new(filter), Box::new(self.conditions()?));
        }
        Ok(filter)
    }

    fn conditions(&mut self) -> Result<Filter, ParseError> {
        let mut filter = self.condition()?;
        while self.eat("&&") {
            filter = Filter::And(Box::new(filter), Box::new(self.condition()?));
        }
        Ok(filter)
    }

    fn condition(&mut self) -> Result<Filter, ParseError> {
        let start = self.cursor.at();
        let not = !self.cursor.rest().starts_with("!=") && self.eat("!");
        let opened = !not && self.eat("(");
        if !not && !opened {
            return self.test();
        }
        if self.depth == DEPTH {
            return error(
                start,
                format!("{}; at most {DEPTH} and `!`", words::TOO_MANY_OPEN),
            );
        }
        self.depth += 1;
        let filter = match not {
            true => Filter::Not(Box::new(self.condition()?)),
            false => self.alternatives()?,
        };
        self.depth -= 1;
        if opened && !self.eat(")") {
            return match self.cursor.rest() {
                "" => self.cursor.error(words::TOO_MANY_OPEN),
                _ => self.cursor.error(format!(
                    "{}; `&&`, `||` or `)` belongs here",
                    words::TOO_MANY_PREDS
                )),
            };
        }
        Ok(filter)
    }

    fn test(&mut self) -> Result<Filter, ParseError> {
        let column = Column(self.cursor.at());
        self.terms += 1;
        if self.terms > TERMS_MAX {
            return self
                .cursor
                .error(format!("{}; at most {TERMS_MAX}", words::TOO_MANY_PREDS));
        }
        let field = self.cursor.take(|c| c == '_' || c.is_ascii_alphanumeric());
        if field.is_empty() || field.starts_with(|c: char| c.is_ascii_digit()) {
            return error(
                column.0,
                format!(
                    "{}; the name of an argument, or pid, tgid, comm or cpu, belongs here",
                    words::FIELD_NOT_FOUND
                ),
            );
        }
        let form = self.form()?;
        self.cursor.blanks();
        let operator_column = self.cursor.at();
        let Some((operator, _)) = OPERATORS
            .iter()
            .find(|(_, sign)| self.cursor.rest().starts_with(sign))
        else {
            return self.cursor.error(format!(
                "{}; write == != < <= > >= & or ~",
                words::INVALID_OP
            ));
        };
        let operator = *operator;
        self.eat(operator.sign());
        let value_column = Column(self.cursor.at());
        let value = self.value(form)?;
        let fits = match &value {
            Value::Number { .. } | Value::Name(_) => operator != Operator::Glob,
            Value::Text(_) => matches!(
                operator,
                Operator::Equal | Operator::NotEqual | Operator::Glob
            ),
            Value::Cpus(_) => matches!(
                operator,
                Operator::Equal | Operator::NotEqual | Operator::AnyBit
            ),
        };
        if !fits {
            let of = match &value {
                Value::Number { .. } | Value::Name(_) => {
                    "`~` compares a text with a pattern, in quotes"
                }
                Value::Text(_) => "texts are compared with == != and ~",
                Value::Cpus(_) => "CPUs are compared with == != and &",
            };
            return error(
                operator_column,
                format!("{}; {of}", words::ILLEGAL_FIELD_OP),
            );
        }
        if let (Operator::Glob, Value::Text(pattern)) = (operator, &value) {
            check_pattern(value_column.0 + 1, pattern)?;
        }
        Ok(Filter::Test(Test {
            column,
            field: field.to_owned(),
            form,
            operator,
            value_column,
            value,
        }))
    }

    /// Parses the form after a field's name.
    fn form(&mut self) -> Result<Form, ParseError> {
        if !self.cursor.rest().starts_with('.') {
            return Ok(Form::Plain);
        }
        let at = self.cursor.at();
        self.cursor.eat(".");
        let word = self.cursor.take(is_of_word);
        let found = Form::WRITTEN
            .iter()
            .find(|(_, written)| written[1..] == *word);
        match found {
            Some((form, _)) => Ok(*form),
            None => error(
                at,
                format!(
                    "{}; there are .function and .ustring",
                    words::FIELD_NOT_FOUND
                ),
            ),
        }
    }

    fn value(&mut self, form: Form) -> Result<Value, ParseError> {
        let start = self.cursor.at();
        if self.cursor.eat("CPUS{") {
            let cpus = self.cpus(start)?;
            self.cursor.blanks();
            return Ok(Value::Cpus(cpus));
        }
        let quote = ["\"", "'"].into_iter().find(|it| self.cursor.eat(it));
        let value = match (quote, self.cursor.rest().chars().next()) {
            (Some(quote), _) => {
                let text = self.cursor.take(|c| !quote.contains(c));
                if self.cursor.rest().is_empty() {
                    return self.cursor.error(words::MISSING_QUOTE);
                }
                if text.len() > OPERAND_MAX {
                    return error(
                        start,
                        format!(
                            "{}; at most {OPERAND_MAX} characters",
                            words::OPERAND_TOO_LONG
                        ),
                    );
                }
                self.cursor.eat(quote);
                Value::Text(text.to_owned())
            }
            (None, Some(c)) if form == Form::Function && (is_of_word(c) || c == '.') => {
                self.symbol(start)?
            }
            (None, Some(c)) if c == '-' || is_of_word(c) => self.unquoted(start)?,
            _ => return self.cursor.error(words::INVALID_VALUE),
        };
        self.cursor.blanks();
        Ok(value)
    }

    /// Parses the name of a function, or an address in a function.
    fn symbol(&mut self, start: usize) -> Result<Value, ParseError> {
        let length = symbol_length(self.cursor.rest());
        let symbol = &self.cursor.rest()[..length];
        if length == 0 || symbol.starts_with(|c: char| c.is_ascii_digit()) {
            return self.unquoted(start);
        }
        self.cursor.eat(symbol);
        Ok(Value::Name(symbol.to_owned()))
    }

    /// Parses the CPUs of a set, after its `{`.
    fn cpus(&mut self, start: usize) -> Result<Vec<(u32, u32)>, ParseError> {
        let mut ranges = Vec::new();
        loop {
            let first = self.cpu()?;
            let last = match self.cursor.eat("-") {
                true => self.cpu()?,
                false => first,
            };
            if last < first {
                return error(start, format!("{}; {first}-{last}", words::INVALID_CPULIST));
            }
            ranges.push((first, last));
            if self.cursor.eat("}") {
                break;
            }
            if !self.cursor.eat(",") {
                return self.cursor.error(words::INVALID_CPULIST);
            }
        }
        match ranges.len() <= TERMS_MAX {
            true => Ok(ranges),
            false => error(
                start,
                format!("{}; at most {TERMS_MAX} ranges", words::INVALID_CPULIST),
            ),
        }
    }

    fn cpu(&mut self) -> Result<u32, ParseError> {
        let at = self.cursor.at();
        let digits = self.cursor.digits();
        decimal(digits)
            .and_then(|cpu| u32::try_from(cpu).ok())
            .map_or_else(|| error(at, words::INVALID_CPULIST), Ok)
    }

    /// Parses a number, or names.
    fn unquoted(&mut self, start: usize) -> Result<Value, ParseError> {
        let sign = if self.cursor.eat("-") { "-" } else { "" };
        let first = self.cursor.take(is_of_word);
        let begins_name =
            |text: &str| text.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic());
        let mut text = format!("{sign}{first}");
        if !begins_name(first) {
            return match read_number(&text) {
                Some(value) => Ok(Value::Number { value, text }),
                None => error(start, words::ILLEGAL_INTVAL),
            };
        }
        // Flags are printed in this form: their names, and the bits without a name as a number.
        while sign.is_empty() && !self.cursor.rest().starts_with("||") && self.cursor.eat("|") {
            let at = self.cursor.at();
            let part = self.cursor.take(is_of_word);
            if !begins_name(part) && read_number(part).is_none() {
                return error(at, words::INVALID_VALUE);
            }
            text = format!("{text}|{part}");
        }
        if text.len() > OPERAND_MAX {
            let message = format!(
                "{}; at most {OPERAND_MAX} characters",
                words::OPERAND_TOO_LONG
            );
            return error(start, message);
        }
        Ok(Value::Name(text))
    }
}

/// Returns whether a number or a name may contain `c`.
fn is_of_word(c: char) -> bool {
    c == '_' || c.is_ascii_alphanumeric()
}

/// Returns the number that `text` consists of, in two's complement.
#[must_use]
pub fn read_number(text: &str) -> Option<u64> {
    match text.starts_with('-') {
        true => signed(text).map(i64::cast_unsigned),
        false => unsigned(text),
    }
}

/// Checks the syntax of `pattern`, which begins at `column`.
fn check_pattern(column: usize, pattern: &str) -> Result<(), ParseError> {
    let unclosed = |open: usize| {
        error(
            column + open,
            format!("{}; missing `]` after `[`", words::INVALID_VALUE),
        )
    };
    let mut rest = 0;
    while let Some(open) = pattern[rest..].find('[') {
        let open = rest + open;
        let mut set = &pattern[open + 1..];
        set = set.strip_prefix(['!', '^']).unwrap_or(set);
        // A `]` in the first position is a member.
        let Some(close) = set.char_indices().skip(1).find(|(_, c)| *c == ']') else {
            return unclosed(open);
        };
        rest = pattern.len() - set.len() + close.0 + 1;
    }
    Ok(())
}
