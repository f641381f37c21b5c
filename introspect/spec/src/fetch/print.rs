//! Printed forms of fetch arguments, types and filters.

use std::fmt;

use super::argument::{Access, Expr, ExprKind, FetchArg, Register};
use super::filter::{Filter, Form, Test, Value};
use super::types::{Element, Shown, TypeName};
use crate::column::Column;

impl FetchArg {
    /// Makes an argument whose text consists of the printed forms of [`Expr`] and [`TypeName`].
    #[must_use]
    pub fn new(name: Option<String>, expr: Expr, ty: Option<TypeName>) -> Self {
        let text = match &ty {
            Some(ty) => format!("{expr}:{ty}"),
            None => expr.to_string(),
        };
        Self {
            name,
            column: Column::default(),
            expr,
            ty,
            text,
        }
    }
}

impl fmt::Display for FetchArg {
    /// Writes `NAME=EXPRESSION:TYPE`, as it was read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}=")?;
        }
        f.write_str(&self.text)
    }
}

impl From<ExprKind> for Expr {
    /// Makes an expression without a position.
    fn from(kind: ExprKind) -> Self {
        Self {
            column: Column::default(),
            kind,
        }
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ExprKind::Register(register) => write!(f, "{register}"),
            ExprKind::Memory(address) => write!(f, "@{address:#x}"),
            ExprKind::Symbol { name, offset: 0 } => write!(f, "@{name}"),
            ExprKind::Symbol { name, offset } => write!(f, "@{name}{offset:+}"),
            ExprKind::Stack => f.write_str("$stack"),
            ExprKind::StackWord(word) => write!(f, "$stack{word}"),
            ExprKind::Argument(number) => write!(f, "$arg{number}"),
            ExprKind::Arguments => f.write_str("$arg*"),
            ExprKind::Return { path } => write!(f, "$retval{}", Path(path)),
            ExprKind::Comm => f.write_str("$comm"),
            ExprKind::Current { path } => write!(f, "$current{}", Path(path)),
            ExprKind::Immediate(number) => write!(f, "\\{number}"),
            ExprKind::Text(text) => write!(f, "\\\"{text}\""),
            ExprKind::Variable { name, path } => write!(f, "{name}{}", Path(path)),
            ExprKind::Dereference {
                user,
                offset,
                inner,
            } => {
                let sign = if *offset < 0 { '-' } else { '+' };
                let user = if *user { "u" } else { "" };
                write!(f, "{sign}{user}{}({inner})", offset.unsigned_abs())
            }
            ExprKind::PerCpu { read, inner } => {
                let how = if *read { "read" } else { "ptr" };
                write!(f, "this_cpu_{how}({inner})")
            }
            ExprKind::Cast {
                of,
                member,
                inner,
                path,
            } => {
                write!(f, "({of}")?;
                if let Some(member) = member {
                    write!(f, ",{member}")?;
                }
                write!(f, ")({inner}){}", Path(path))
            }
        }
    }
}

/// Chain of accesses.
struct Path<'a>(&'a [Access]);

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|access| {
            let sign = if access.arrow { "->" } else { "." };
            write!(f, "{sign}{}", access.field)
        })
    }
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.name())
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unsigned => "u",
            Self::Signed => "s",
            Self::Hex => "x",
        })
    }
}

impl fmt::Display for TypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.element {
            Element::Integer { shown, bits } => write!(f, "{shown}{bits}")?,
            Element::Own { shown: Some(shown) } => write!(f, "{shown}")?,
            Element::Own { shown: None } => f.write_str("d")?,
            Element::Char => f.write_str("char")?,
            Element::String => f.write_str("string")?,
            Element::UserString => f.write_str("ustring")?,
            Element::Symbol => f.write_str("symbol")?,
            Element::SymbolString => f.write_str("symstr")?,
            Element::Bitfield {
                width,
                offset,
                container,
            } => write!(f, "b{width}@{offset}/{container}")?,
            Element::DentryName => f.write_str("%pd")?,
            Element::FileName => f.write_str("%pD")?,
        }
        match self.count {
            Some(count) => write!(f, "[{count}]"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Test(test) => write!(f, "{test}"),
            Self::Not(filter) => write!(f, "!({filter})"),
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

fn part(f: &mut fmt::Formatter<'_>, filter: &Filter, braces: bool) -> fmt::Result {
    match braces {
        true => write!(f, "({filter})"),
        false => write!(f, "{filter}"),
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = Form::WRITTEN.iter().find(|(form, _)| *form == self.form);
        let form = form.map_or("", |(_, written)| *written);
        write!(f, "{}{form} {} ", self.field, self.operator.sign())?;
        match &self.value {
            Value::Number { text, .. } | Value::Name(text) => f.write_str(text),
            // A text that was read contains at most one kind of quotes.
            Value::Text(text) if text.contains('"') => write!(f, "'{text}'"),
            Value::Text(text) => write!(f, "\"{text}\""),
            Value::Cpus(ranges) => {
                f.write_str("CPUS{")?;
                for (at, (first, last)) in ranges.iter().enumerate() {
                    let comma = if at > 0 { "," } else { "" };
                    match first == last {
                        true => write!(f, "{comma}{first}")?,
                        false => write!(f, "{comma}{first}-{last}")?,
                    }
                }
                f.write_str("}")
            }
        }
    }
}
