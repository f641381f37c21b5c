//! Parser of conditions on values.

use super::cursor::Cursor;
use super::read_operand::{
    CALCULATING, NO_ARITHMETIC, VALUES, begins_value, no_arithmetic, no_value, operators,
    read_kept, read_operand,
};
use super::syntax::{Compared, Condition, Fetched, Operand, OperandKind, With};
use crate::column::Column;
use crate::fetch::{Operator, TERMS_MAX};
use crate::parse_error::{ParseError, error, quoted};

/// Maximum nesting of parentheses and `!`.
const DEPTH: usize = 32;

/// Parses a condition between two `/`; the first one comes next.
pub(super) fn read_condition(cursor: &mut Cursor) -> Result<Condition, ParseError> {
    let opened = cursor.at();
    cursor.eat("/");
    let mut reader = Reader {
        cursor,
        terms: 0,
        depth: 0,
    };
    reader.cursor.blanks()?;
    if reader.cursor.sees("/") {
        return reader
            .cursor
            .error("a condition belongs here; leave out both `/` if there is none");
    }
    let condition = reader.alternatives()?;
    if cursor.peek().is_none() {
        return error(opened, "this condition has no end: missing `/`");
    }
    cursor.expect(
        "/",
        "`&&`, `||` or the `/` behind the condition belongs here",
    )?;
    Ok(condition)
}

/// Parser at a position in a condition.
struct Reader<'c> {
    cursor: &'c mut Cursor,
    terms: usize,
    depth: usize,
}

impl Reader<'_> {
    fn alternatives(&mut self) -> Result<Condition, ParseError> {
        let mut condition = self.conjunction()?;
        while self.eat("||")? {
            condition = Condition::Or(Box::new(condition), Box::new(self.conjunction()?));
        }
        Ok(condition)
    }

    fn conjunction(&mut self) -> Result<Condition, ParseError> {
        let mut condition = self.part()?;
        while self.eat("&&")? {
            condition = Condition::And(Box::new(condition), Box::new(self.part()?));
        }
        Ok(condition)
    }

    fn eat(&mut self, what: &str) -> Result<bool, ParseError> {
        let found = self.cursor.eat(what);
        if found {
            self.cursor.blanks()?;
        }
        Ok(found)
    }

    fn part(&mut self) -> Result<Condition, ParseError> {
        let start = self.cursor.at();
        let not = self.eat("!")?;
        let opened = !not && self.eat("(")?;
        if !not && !opened {
            return self.test();
        }
        if self.depth == DEPTH {
            return error(start, format!("at most {DEPTH} parentheses and `!`"));
        }
        self.depth += 1;
        let condition = match not {
            true => Condition::Not(Box::new(self.negated()?)),
            false => self.alternatives()?,
        };
        self.depth -= 1;
        if opened && !self.eat(")")? {
            return self.cursor.error("`&&`, `||` or `)` belongs here");
        }
        Ok(condition)
    }

    /// Parses the operand of `!`. A comparison must be in parentheses.
    fn negated(&mut self) -> Result<Condition, ParseError> {
        let start = self.cursor.at();
        if self.cursor.sees("!") || self.cursor.sees("(") {
            return self.part();
        }
        let condition = self.test()?;
        match &condition {
            Condition::Test { operand, value, .. } if operand.column.0 == value.column.0 => {
                Ok(condition)
            }
            Condition::Kept { .. } => Ok(condition),
            _ => error(
                start,
                "what is compared behind `!` stands in parentheses: !(...)",
            ),
        }
    }

    fn test(&mut self) -> Result<Condition, ParseError> {
        let start = self.cursor.at();
        self.terms += 1;
        if self.terms > TERMS_MAX {
            return error(start, format!("at most {TERMS_MAX} comparisons"));
        }
        if self.cursor.sees("@") {
            let map = read_kept(self.cursor)?;
            if operators().any(|(_, sign)| self.cursor.sees(sign)) && !self.cursor.sees("&&") {
                return self
                    .cursor
                    .error("not supported: comparing what is in a map");
            }
            self.no_other_operator()?;
            let column = Column(start);
            return Ok(Condition::Kept { column, map });
        }
        let left = self.side()?;
        let at = self.cursor.at();
        let Some(operator) = self.operator()? else {
            self.no_other_operator()?;
            return match left {
                // As in C, a value alone means that it is not zero.
                Side::Operand(operand) if !operand.kind.is_text() => Ok(Condition::Test {
                    value: Compared {
                        column: operand.column,
                        with: With::Number(0),
                    },
                    operator: Operator::NotEqual,
                    operand,
                }),
                Side::Compared(Compared {
                    column,
                    with: With::Names(name),
                }) => no_value(column.0, &name),
                _ => error(start, "this is no condition: compare it with something"),
            };
        };
        let right = self.right()?;
        let again = self.cursor.at();
        if self.operator()?.is_some() {
            let message = match operator {
                Operator::AnyBit => {
                    "`VALUE & BITS` is a condition by itself: whether one of the bits is set"
                }
                _ => "`&&` or `||` belongs between comparisons",
            };
            return error(again, message);
        }
        self.no_other_operator()?;
        let (operand, operator, value) = match (left, right) {
            (Side::Operand(operand), Side::Compared(value)) => (operand, operator, value),
            (Side::Compared(value), Side::Operand(operand)) => (operand, turned(operator), value),
            (Side::Compared(left), Side::Compared(right)) => {
                for side in [left, right] {
                    if let With::Names(name) = &side.with {
                        return no_value(side.column.0, name);
                    }
                }
                return error(start, "both sides are always the same");
            }
            (Side::Operand(_), Side::Operand(right)) => {
                let message =
                    "not supported: comparing two values; compare one with a number or a text";
                return error(right.column.0, message);
            }
        };
        let value = named(&operand.kind, value)?;
        let is_text = matches!(value.with, With::Text(_));
        if operand.kind.is_text() != is_text && !may_be_both(&operand.kind) {
            let message = match operand.kind.is_text() {
                true => "it is a text: compare it with one, in quotes",
                false => "it is a number: compare it with one, or write str() for the text there",
            };
            return error(operand.column.0, message);
        }
        if is_text && !matches!(operator, Operator::Equal | Operator::NotEqual) {
            return error(at, "texts are compared with == and !=");
        }
        Ok(Condition::Test {
            operand,
            operator,
            value,
        })
    }

    /// Parses one side of a comparison, and the blanks after it.
    fn side(&mut self) -> Result<Side, ParseError> {
        let column = Column(self.cursor.at());
        if let Some(name) = self.name()? {
            if self.sees_bar() {
                let message = "names of several bits stand in parentheses: VALUE & (NAME|NAME)";
                return self.cursor.error(message);
            }
            let with = With::Names(name);
            return Ok(Side::Compared(Compared { column, with }));
        }
        let Operand { column, kind } = read_operand(self.cursor)?;
        let with = match kind {
            OperandKind::Number(number) => With::Number(number),
            OperandKind::Text(text) => With::Text(text),
            kind => return Ok(Side::Operand(Operand { column, kind })),
        };
        Ok(Side::Compared(Compared { column, with }))
    }

    /// Parses the right-hand side of a comparison, which may be names in parentheses, and the blanks after it.
    fn right(&mut self) -> Result<Side, ParseError> {
        let column = Column(self.cursor.at());
        if !self.eat("(")? {
            return self.side();
        }
        let Some(mut names) = self.name()? else {
            return error(column.0, CALCULATING);
        };
        while self.sees_bar() && self.eat("|")? {
            let at = self.cursor.at();
            let part = self.cursor.word();
            if part.is_empty() {
                return error(at, "the name of a value, or a number, belongs here");
            }
            names = format!("{names}|{part}");
            self.cursor.blanks()?;
        }
        self.cursor.expect(")", "`|` or `)` belongs here")?;
        self.cursor.blanks()?;
        let with = With::Names(names);
        Ok(Side::Compared(Compared { column, with }))
    }

    fn sees_bar(&self) -> bool {
        self.cursor.sees("|") && !self.cursor.sees("||")
    }

    /// Takes the name of a constant and the blanks after it. Returns `None` if no name comes next, or if the next
    /// word begins a value.
    fn name(&mut self) -> Result<Option<String>, ParseError> {
        let Some(word) = self.cursor.name().filter(|word| !begins_value(word)) else {
            return Ok(None);
        };
        self.cursor.eat(&word);
        self.cursor.blanks()?;
        Ok(Some(word))
    }

    fn operator(&mut self) -> Result<Option<Operator>, ParseError> {
        if self.cursor.sees("&&") {
            return Ok(None);
        }
        let found = operators().find(|(_, sign)| self.cursor.sees(sign));
        if let Some((_, sign)) = found {
            if self.cursor.sees("<<") || self.cursor.sees(">>") {
                return self.cursor.error(NO_ARITHMETIC);
            }
            self.eat(sign)?;
        }
        Ok(found.map(|(operator, _)| *operator))
    }

    /// Returns an error if an operator comes next, except for the `/` that ends a condition.
    fn no_other_operator(&self) -> Result<(), ParseError> {
        match self.cursor.sees("/") {
            true => Ok(()),
            false => no_arithmetic(self.cursor),
        }
    }
}

/// One side of a comparison.
enum Side {
    /// A value of the hit.
    Operand(Operand),
    /// A constant.
    Compared(Compared),
}

/// Returns `value`, the right-hand side of a comparison with `operand`, with its name replaced by a number. Names
/// that are compared with `args` are kept, because the guest's types decide what they mean. Other fetched operands
/// have no types, so only the names `NULL`, `true` and `false` are known for them.
fn named(operand: &OperandKind, value: Compared) -> Result<Compared, ParseError> {
    let With::Names(names) = &value.with else {
        return Ok(value);
    };
    let number = match (operand, names.as_str()) {
        (OperandKind::Fetched(Fetched::Named(_)), _) => return Ok(value),
        // `Reader::test` refuses the comparison of a text with a name.
        (operand, _) if operand.is_text() => return Ok(value),
        (OperandKind::Fetched(_), "NULL" | "false") => 0,
        (OperandKind::Fetched(_), "true") => 1,
        (OperandKind::Fetched(_), name) => {
            let message = format!(
                "{} is no value, and names of values are known of args.NAME only; {VALUES}",
                quoted(name)
            );
            return error(value.column.0, message);
        }
        (_, name) => return no_value(value.column.0, name),
    };
    Ok(Compared {
        with: With::Number(number),
        ..value
    })
}

/// Returns whether the guest's types decide if the value is a number or a text.
fn may_be_both(kind: &OperandKind) -> bool {
    matches!(kind, OperandKind::Fetched(Fetched::Named(_)))
}

/// Returns the operator for swapped sides.
fn turned(operator: Operator) -> Operator {
    match operator {
        Operator::Less => Operator::Greater,
        Operator::LessOrEqual => Operator::GreaterOrEqual,
        Operator::Greater => Operator::Less,
        Operator::GreaterOrEqual => Operator::LessOrEqual,
        same => same,
    }
}
