//! Printed forms of scripts.

use std::fmt;

use super::format::{Format, Piece};
use super::syntax::{
    BUILTINS, Clause, Compared, Condition, Fetched, Gather, MapFunction, Operand, OperandKind,
    Point, PointKind, Script, Statement, StatementKind, With,
};
use crate::fetch::Operator;

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for clause in &self.clauses {
            writeln!(f, "{clause}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        list(f, &self.points)?;
        if let Some(condition) = &self.condition {
            write!(f, " /{condition}/")?;
        }
        f.write_str(" {")?;
        for statement in &self.statements {
            write!(f, " {statement};")?;
        }
        f.write_str(" }")
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            PointKind::Begin => f.write_str("BEGIN"),
            PointKind::End => f.write_str("END"),
            PointKind::Interval(length) => write!(f, "interval:ms:{length}"),
            PointKind::Function {
                returns, target, ..
            } => match returns {
                true => write!(f, "kretprobe:{target}"),
                false => write!(f, "kprobe:{target}"),
            },
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Test {
                operand,
                operator,
                value,
            } => write!(f, "{operand} {} {value}", operator.sign()),
            Self::Kept { map, .. } => write!(f, "@{map}[tid]"),
            Self::Not(inner) => match &**inner {
                Self::Kept { .. } => write!(f, "!{inner}"),
                Self::Test {
                    operand,
                    operator: Operator::NotEqual,
                    value,
                } if value.with == With::Number(0) => write!(f, "!{operand}"),
                Self::Test { .. } | Self::And(..) | Self::Or(..) => write!(f, "!({inner})"),
                Self::Not(_) => write!(f, "!{inner}"),
            },
            // Both operators group from the left.
            Self::And(left, right) => {
                part(f, left, matches!(**left, Self::Or(..)))?;
                f.write_str(" && ")?;
                part(f, right, matches!(**right, Self::Or(..) | Self::And(..)))
            }
            Self::Or(left, right) => {
                part(f, left, false)?;
                f.write_str(" || ")?;
                part(f, right, matches!(**right, Self::Or(..)))
            }
        }
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.with {
            With::Number(number) => write!(f, "{number}"),
            With::Text(text) => quoted(f, text),
            With::Names(names) if names.contains('|') => write!(f, "({names})"),
            With::Names(name) => f.write_str(name),
        }
    }
}

fn part(f: &mut fmt::Formatter<'_>, condition: &Condition, braces: bool) -> fmt::Result {
    match braces {
        true => write!(f, "({condition})"),
        false => write!(f, "{condition}"),
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            StatementKind::Gather { map, keys, what } => {
                write!(f, "@{map}")?;
                if !keys.is_empty() {
                    f.write_str("[")?;
                    list(f, keys)?;
                    f.write_str("]")?;
                }
                write!(f, " = {what}")
            }
            StatementKind::Keep { map } => write!(f, "@{map}[tid] = nsecs"),
            StatementKind::Forget { map } => write!(f, "delete(@{map}[tid])"),
            StatementKind::Printf { format, values } => {
                f.write_str("printf(")?;
                quoted(f, &format.to_string())?;
                for value in values {
                    write!(f, ", {value}")?;
                }
                f.write_str(")")
            }
            StatementKind::Print { map, top } => match top {
                Some(top) => write!(f, "print(@{map}, {top})"),
                None => write!(f, "print(@{map})"),
            },
            StatementKind::Clear { map } => write!(f, "clear(@{map})"),
            StatementKind::Time(format) => {
                f.write_str("time(")?;
                quoted(f, format)?;
                f.write_str(")")
            }
            StatementKind::Exit => f.write_str("exit()"),
        }
    }
}

impl fmt::Display for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = self.of.as_ref().map(ToString::to_string);
        let of = of.unwrap_or_default();
        match self.aggregate {
            MapFunction::Hits => f.write_str("count()"),
            MapFunction::Sum => write!(f, "sum({of})"),
            MapFunction::Average => write!(f, "avg({of})"),
            MapFunction::Least => write!(f, "min({of})"),
            MapFunction::Greatest => write!(f, "max({of})"),
            MapFunction::Powers => write!(f, "hist({of})"),
            MapFunction::Steps { min, max, step } => write!(f, "lhist({of}, {min}, {max}, {step})"),
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)
    }
}

impl fmt::Display for OperandKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OperandKind::Number(number) => write!(f, "{number}"),
            OperandKind::Text(text) => quoted(f, text),
            OperandKind::Builtin(builtin) => {
                let name = BUILTINS.iter().find(|(known, _)| known == builtin);
                f.write_str(name.map_or("", |(_, name)| name))
            }
            OperandKind::Since(map) => write!(f, "nsecs - @{map}[tid]"),
            OperandKind::Fetched(of) => write!(f, "{of}"),
            OperandKind::Str(of) => write!(f, "str({of})"),
            OperandKind::Ksym(of) => write!(f, "ksym({of})"),
            OperandKind::Divided { of, by } => match **of {
                OperandKind::Since(_) => write!(f, "({of}) / {by}"),
                _ => write!(f, "{of} / {by}"),
            },
        }
    }
}

impl fmt::Display for Fetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument(number) => write!(f, "arg{number}"),
            Self::Named(path) => write!(f, "args.{path}"),
            Self::Return => f.write_str("retval"),
            Self::CurrentTask => f.write_str("curtask"),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => f.write_str(&text.replace('%', "%%"))?,
                Piece::Directive(directive) => write!(f, "{directive}")?,
            }
        }
        Ok(())
    }
}

fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, all: &[T]) -> fmt::Result {
    for (at, one) in all.iter().enumerate() {
        write!(f, "{}{one}", if at > 0 { ", " } else { "" })?;
    }
    Ok(())
}

/// Writes `text` in quotes.
fn quoted(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_str("\"")?;
    for c in text.chars() {
        match c {
            '\n' => f.write_str("\\n")?,
            '\t' => f.write_str("\\t")?,
            '\r' => f.write_str("\\r")?,
            '"' | '\\' => write!(f, "\\{c}")?,
            c => write!(f, "{c}")?,
        }
    }
    f.write_str("\"")
}
