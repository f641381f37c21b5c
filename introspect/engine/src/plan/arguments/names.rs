//! Names of values in filters: any name that events show for a field can be used.
//!
//! Invariant: a name has the value that it is shown for, according to the field's own type. A name that the
//! field never shows is refused at its column, with similar names.

use hvprobe_linux::symbols::{Offer, nearest};
use hvprobe_spec::fetch::{read_number, words};
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{ParseError, errno};

use super::refused::refused;

/// The name of the null pointer.
pub(super) const NULL: &str = "NULL";

/// A named value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) value: u64,
    /// Bits that the name covers; `None` for all bits.
    pub(super) mask: Option<u64>,
}

impl Named {
    fn whole(value: u64) -> Self {
        Self { value, mask: None }
    }
}

/// Returns the values of the names in `text`, which begins at `column`. The names must belong to values of the
/// field `of`. `shape` is the type of the field, if its values have names.
pub(super) fn named(
    column: usize,
    text: &str,
    of: &str,
    shape: Option<&Shape>,
) -> Result<Vec<Named>, ParseError> {
    if let Some(error) = text.strip_prefix('-') {
        return Ok(vec![below_zero(column, error)?]);
    }
    let mut all = Vec::new();
    let mut at = column;
    for part in text.split('|') {
        all.push(match read_number(part) {
            Some(value) => Named::whole(value),
            None => one(at, part, of, shape)?,
        });
        at += part.len() + 1;
    }
    Ok(all)
}

/// Returns the negative value with which functions report the error `name`.
fn below_zero(column: usize, name: &str) -> Result<Named, ParseError> {
    if let Some(number) = errno::number(name) {
        return Ok(Named::whole(u64::from(number).wrapping_neg()));
    }
    let near: Vec<_> = nearest(name, errno::names())
        .iter()
        .map(|name| format!("-{name}"))
        .collect();
    let why = format!("no error is called `{name}`{}", Offer(&near));
    Err(wrong(column, &why))
}

fn one(column: usize, name: &str, of: &str, shape: Option<&Shape>) -> Result<Named, ParseError> {
    let known = shape.map(values).unwrap_or_default();
    if let Some((_, named)) = known.iter().find(|(known, _)| *known == name) {
        return Ok(*named);
    }
    let why = match known.as_slice() {
        _ if errno::number(name).is_some() => {
            format!("errors are returned below zero: write -{name}")
        }
        [] => format!("values of `{of}` have no names: write a number"),
        known => {
            let names = || known.iter().map(|(name, _)| *name);
            let near = nearest(name, names());
            let there: Vec<_> = names().take(SHOWN).collect();
            let there = match near.is_empty() {
                true => format!("; there are {}", there.join(", ")),
                false => Offer(&near).to_string(),
            };
            format!("no value of `{of}` is called `{name}`{there}")
        }
    };
    Err(wrong(column, &why))
}

/// Number of names to list if none is similar.
const SHOWN: usize = 8;

/// Returns the names of values of type `shape`.
fn values(shape: &Shape) -> Vec<(&str, Named)> {
    match &shape.kind {
        ShapeKind::Enum { values, .. } => {
            let named = values.iter().map(|it| {
                let value = it.value.cast_unsigned();
                let mask = it.mask;
                (it.name.as_str(), Named { value, mask })
            });
            named.collect()
        }
        ShapeKind::Bool => vec![("false", Named::whole(0)), ("true", Named::whole(1))],
        ShapeKind::Pointer | ShapeKind::Symbol => vec![(NULL, Named::whole(0))],
        _ => Vec::new(),
    }
}

fn wrong(column: usize, why: &str) -> ParseError {
    refused(column, format!("{}; {why}", words::filter::INVALID_VALUE))
}

#[cfg(test)]
mod tests {
    use hvprobe_spec::shape::Enumerator;

    use super::*;

    fn shape(kind: ShapeKind) -> Shape {
        Shape {
            name: "it".to_owned(),
            size: 4,
            kind,
        }
    }

    #[test]
    fn names_are_those_of_the_type() {
        let values = [("HRTIMER_MODE_ABS", 0), ("HRTIMER_MODE_REL", 1)];
        let mode = shape(ShapeKind::Enum {
            signed: false,
            values: values
                .map(|(name, value)| Enumerator {
                    name: name.to_owned(),
                    value,
                    mask: None,
                })
                .into(),
        });
        let flag = shape(ShapeKind::Bool);
        for (shape, text, expected) in [
            (&mode, "HRTIMER_MODE_REL", vec![1]),
            (&mode, "HRTIMER_MODE_REL|0x40", vec![1, 0x40]),
            (&mode, "-ENOENT", vec![2_u64.wrapping_neg()]),
            (&flag, "true", vec![1]),
            (&flag, "false", vec![0]),
        ] {
            let found = named(0, text, "mode", Some(shape)).unwrap();
            let found: Vec<_> = found.iter().map(|it| it.value).collect();
            assert_eq!(found, expected, "{text}");
        }
        for (text, column, near) in [
            ("hrtimer_mode_abs", 9, "did you mean `HRTIMER_MODE_ABS`?"),
            ("1x", 9, "there are HRTIMER_MODE_ABS, HRTIMER_MODE_REL"),
            (
                "HRTIMER_MODE_REL|NULL",
                26,
                "there are HRTIMER_MODE_ABS, HRTIMER_MODE_REL",
            ),
        ] {
            let error = named(9, text, "mode", Some(&mode)).unwrap_err();
            assert_eq!(error.column, column, "{text}");
            assert!(error.message.ends_with(near), "{error}");
        }
    }
}
