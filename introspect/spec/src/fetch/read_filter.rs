//! Reading filters.

use super::filter::{Filter, Operator, Test, Value};
use super::number::{signed, unsigned};
use super::words::filter as words;
use crate::column::Column;
use crate::parse_error::{ParseError, error};

/// The most comparisons of a filter.
pub const TERMS_MAX: usize = 64;
/// The longest text to compare with, as in the kernel (`MAX_FILTER_STR_VAL` less the final NUL).
pub const OPERAND_MAX: usize = 255;
/// How deep parentheses and `!` can be nested.
const DEPTH: usize = 32;

/// The operators, one that begins another one behind it.
const OPERATORS: [(Operator, &str); 8] = [
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
    /// As it is written.
    #[must_use]
    pub fn sign(self) -> &'static str {
        let found = OPERATORS.iter().find(|(known, _)| *known == self);
        found.map_or("", |(_, sign)| sign)
    }
}

/// Reads a filter, which is one line of ASCII.
///
/// # Errors
/// When the text is anything but a filter, with the column and the reason.
pub fn read_filter(text: &str) -> Result<Filter, ParseError> {
    if let Some((column, c)) = text
        .chars()
        .enumerate()
        .find(|(_, c)| !(matches!(c, ' '..='~') || *c == '\t'))
    {
        return error(column, format!("{c:?}: a filter is one line of ASCII"));
    }
    read_at(0, text)
}

/// Reads `text`, which begins at `column` and is ASCII.
pub(crate) fn read_at(column: usize, text: &str) -> Result<Filter, ParseError> {
    let mut reader = Reader {
        column,
        text,
        at: 0,
        terms: 0,
        depth: 0,
    };
    reader.blanks();
    if reader.rest().is_empty() {
        return reader.error(words::NO_FILTER);
    }
    let filter = reader.alternatives()?;
    if reader.rest().starts_with(')') {
        return reader.error(words::TOO_MANY_CLOSE);
    }
    if !reader.rest().is_empty() {
        return reader.error(format!(
            "{}; `&&` or `||` belongs here",
            words::TOO_MANY_PREDS
        ));
    }
    Ok(filter)
}

/// A place in the text of a filter.
struct Reader<'a> {
    column: usize,
    text: &'a str,
    at: usize,
    terms: usize,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn column(&self) -> usize {
        self.column + self.at
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        error(self.column(), message)
    }

    fn blanks(&mut self) {
        while self.rest().starts_with([' ', '\t']) {
            self.at += 1;
        }
    }

    /// Goes behind `what` and the blanks that follow, if it is here.
    fn eat(&mut self, what: &str) -> bool {
        let found = self.rest().starts_with(what);
        if found {
            self.at += what.len();
            self.blanks();
        }
        found
    }

    /// The characters from here on that belong.
    fn take(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
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
        let start = self.column();
        let not = !self.rest().starts_with("!=") && self.eat("!");
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
            return match self.rest() {
                "" => self.error(words::TOO_MANY_OPEN),
                _ => self.error(format!(
                    "{}; `&&`, `||` or `)` belongs here",
                    words::TOO_MANY_PREDS
                )),
            };
        }
        Ok(filter)
    }

    fn test(&mut self) -> Result<Filter, ParseError> {
        let column = Column(self.column());
        self.terms += 1;
        if self.terms > TERMS_MAX {
            return self.error(format!("{}; at most {TERMS_MAX}", words::TOO_MANY_PREDS));
        }
        let field = self.take(|c| c == '_' || c.is_ascii_alphanumeric());
        if field.is_empty() || field.starts_with(|c: char| c.is_ascii_digit()) {
            return error(
                column.0,
                format!(
                    "{}; the name of an argument, or pid, tgid, comm or cpu, belongs here",
                    words::FIELD_NOT_FOUND
                ),
            );
        }
        self.blanks();
        let operator_column = self.column();
        let Some((operator, _)) = OPERATORS
            .iter()
            .find(|(_, sign)| self.rest().starts_with(sign))
        else {
            return self.error(format!(
                "{}; write == != < <= > >= & or ~",
                words::INVALID_OP
            ));
        };
        let operator = *operator;
        self.eat(operator.sign());
        let value_column = Column(self.column());
        let value = self.value()?;
        let fits = match &value {
            Value::Number(_) => operator != Operator::Glob,
            Value::Text(_) => matches!(
                operator,
                Operator::Equal | Operator::NotEqual | Operator::Glob
            ),
        };
        if !fits {
            let of = match &value {
                Value::Number(_) => "`~` compares a text with a pattern",
                Value::Text(_) => "texts are compared with == != and ~",
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
            operator,
            value_column,
            value,
        }))
    }

    fn value(&mut self) -> Result<Value, ParseError> {
        let start = self.column();
        let value = match self.rest().chars().next() {
            Some(quote @ ('"' | '\'')) => {
                self.at += 1;
                let text = self.take(|c| c != quote);
                if self.rest().is_empty() {
                    return self.error(words::MISSING_QUOTE);
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
                self.at += 1;
                Value::Text(text.to_owned())
            }
            Some('0'..='9' | '-') => {
                let sign = self.take_sign();
                let digits = self.take(|c| c.is_ascii_alphanumeric());
                let number = match sign {
                    true => signed(&format!("-{digits}")).map(i64::cast_unsigned),
                    false => unsigned(digits),
                };
                match number {
                    Some(number) => Value::Number(number),
                    None => return error(start, words::ILLEGAL_INTVAL),
                }
            }
            _ => return self.error(words::INVALID_VALUE),
        };
        self.blanks();
        Ok(value)
    }

    fn take_sign(&mut self) -> bool {
        let negative = self.rest().starts_with('-');
        self.at += usize::from(negative);
        negative
    }
}

/// Whether `pattern`, which begins at `column`, is one.
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
        // A `]` that comes first is a member.
        let Some(close) = set.char_indices().skip(1).find(|(_, c)| *c == ']') else {
            return unclosed(open);
        };
        rest = pattern.len() - set.len() + close.0 + 1;
    }
    Ok(())
}
