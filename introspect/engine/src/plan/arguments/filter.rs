//! Resolves filters: field names become comparisons at a hit.
//!
//! Invariant: a field is an argument of the probe or a field of every event, and is compared as a value of its own
//! type; anything else is refused at its column. A comparison that can be a condition on a register becomes one: a
//! condition costs no exit and, if it does not hold, no record.

use hvprobe_spec::fetch::{Filter, Form, Operator, Test, Value, words};
use hvprobe_spec::predicate::{Check, Field, Predicate, With};
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{Argument, Bits, Common, Comparison, Condition, ParseError, Source};

use super::addresses::of_function;
use super::names::{NULL, Named, named};
use super::refused::refused;
use crate::plan::kernel::Probeable;

/// Returns the names of the fields that are compared as texts.
pub(super) fn texts(filter: &Filter) -> Vec<&str> {
    match filter {
        Filter::Test(test) => match test.value {
            Value::Text(_) => vec![&test.field],
            Value::Number { .. } | Value::Name(_) | Value::Cpus(_) => Vec::new(),
        },
        Filter::Not(filter) => texts(filter),
        Filter::And(left, right) | Filter::Or(left, right) => [texts(left), texts(right)].concat(),
    }
}

/// Splits `filter` into conditions on registers, which must all hold, and the rest. `arguments` are those of the
/// events. If `returns` is set, there are no conditions: conditions are checked at the function's entry, but a
/// register in the filter of a return probe has its value at the return.
pub(super) fn resolve(
    filter: &Filter,
    arguments: &[Argument],
    returns: bool,
    kernel: &Probeable<'_>,
) -> Result<(Vec<Condition>, Option<Predicate>), ParseError> {
    let mut conditions = Vec::new();
    let mut rest = Vec::new();
    for part in conjuncts(filter) {
        let part = predicate(part, arguments, Some(kernel))?;
        match condition(&part).filter(|_| !returns) {
            Some(condition) => conditions.push(condition),
            None => rest.push(part),
        }
    }
    let rest = match rest.len() {
        0 => None,
        1 => rest.pop(),
        _ => Some(Predicate::All(rest)),
    };
    Ok((conditions, rest))
}

/// Returns the parts of `filter` that must all hold.
fn conjuncts(filter: &Filter) -> Vec<&Filter> {
    match filter {
        Filter::And(left, right) => [conjuncts(left), conjuncts(right)].concat(),
        other => vec![other],
    }
}

/// Resolves `filter` for events of any probe. It can only use the fields that every event has.
///
/// # Errors
/// When it names any other field, or compares a number with a text; with the column and the reason.
pub fn on_any_event(filter: &Filter) -> Result<Predicate, ParseError> {
    predicate(filter, &[], None)
}

/// Resolves `filter` for events with `arguments`. Comparisons with functions need `kernel`.
pub(super) fn predicate(
    filter: &Filter,
    arguments: &[Argument],
    kernel: Option<&Probeable<'_>>,
) -> Result<Predicate, ParseError> {
    let sub = |filter: &Filter| predicate(filter, arguments, kernel);
    Ok(match filter {
        Filter::Test(test) => check(test, arguments, kernel)?,
        Filter::Not(filter) => Predicate::Not(Box::new(sub(filter)?)),
        Filter::And(left, right) => Predicate::All(vec![sub(left)?, sub(right)?]),
        Filter::Or(left, right) => Predicate::Any(vec![sub(left)?, sub(right)?]),
    })
}

fn check(
    test: &Test,
    arguments: &[Argument],
    kernel: Option<&Probeable<'_>>,
) -> Result<Predicate, ParseError> {
    let column = test.column.0;
    let (field, shape) = field(test, arguments)?;
    match (test.form, &test.value) {
        (Form::Function, _) => return in_function(test, &field, kernel),
        (Form::Text, Value::Number { .. } | Value::Name(_) | Value::Cpus(_)) => {
            let why = "`.ustring` is compared with a text, in quotes";
            return Err(wrong(test.value_column.0, why));
        }
        (Form::Plain | Form::Text, _) => {}
    }
    let with = match (&test.value, &field) {
        (Value::Number { text, .. }, Field::Text(_)) => {
            let why = format!("`{}` is a text: compare it with \"{text}\"", test.field);
            return Err(wrong(column, &why));
        }
        (Value::Name(text), Field::Text(_)) => {
            let words = words::filter::INVALID_VALUE;
            let field = &test.field;
            let why = match text.as_str() {
                NULL => {
                    format!(
                        "{words}; `{field}` is a text: fetch its address, too, and compare that with 0"
                    )
                }
                text => format!("{words}; `{field}` is a text: write \"{text}\""),
            };
            return Err(refused(test.value_column.0, why));
        }
        (Value::Number { value, .. }, field) => With::Number(test.operator, cut(*value, field)),
        (Value::Cpus(_), Field::Text(_)) => {
            return Err(wrong(
                column,
                &format!("`{}` is a text, and no CPU", test.field),
            ));
        }
        (Value::Cpus(cpus), field) => return in_cpus(test, field, cpus),
        (Value::Name(text), _) => {
            let named = named(test.value_column.0, text, &test.field, shape)?;
            return by_names(test, &field, &named);
        }
        (Value::Text(text), Field::Text(_)) => With::Text(test.operator, text.as_bytes().into()),
        (Value::Text(_), _) => {
            let why = format!(
                "`{}` is no text: fetch one, as in +0(%si):string",
                test.field
            );
            return Err(wrong(column, &why));
        }
    };
    Ok(Predicate::Check(Check { field, with }))
}

/// Returns the check whether `field` is an address in the function that `test` names.
fn in_function(
    test: &Test,
    field: &Field,
    kernel: Option<&Probeable<'_>>,
) -> Result<Predicate, ParseError> {
    let column = test.column.0;
    let is_address = matches!(
        field,
        Field::Number {
            size: 8,
            bits: None,
            ..
        }
    );
    if !is_address {
        let why = format!("`{}` is no address: these have 8 bytes", test.field);
        return Err(wrong(column, &why));
    }
    let kernel = kernel.ok_or_else(|| {
        let why = "functions are known to the filters of probes only";
        wrong(column, why)
    })?;
    let found = of_function(kernel.image.symbols(), &test.value);
    let (first, last) = found.map_err(|why| refused(test.value_column.0, why))?;
    let unsigned = match field.clone() {
        Field::Number {
            source, size, bits, ..
        } => Field::Number {
            source,
            size,
            bits,
            signed: false,
        },
        other => other,
    };
    match test.operator {
        Operator::Equal => Ok(between(&unsigned, first, last)),
        Operator::NotEqual => Ok(Predicate::Any(vec![
            compare(&unsigned, Operator::Less, first),
            compare(&unsigned, Operator::Greater, last),
        ])),
        _ => Err(wrong(column, "`.function` is compared with == and !=")),
    }
}

/// Returns the comparison of `field` with `cpus`. Equality requires a single CPU; `&` holds if the field is the
/// number of any of the CPUs.
fn in_cpus(test: &Test, field: &Field, cpus: &[(u32, u32)]) -> Result<Predicate, ParseError> {
    match (test.operator, cpus) {
        (Operator::AnyBit, cpus) => {
            let ranges = cpus.iter();
            let any = ranges.map(|(first, last)| between(field, (*first).into(), (*last).into()));
            Ok(Predicate::Any(any.collect()))
        }
        (operator, [(first, last)]) if first == last => {
            Ok(compare(field, operator, u64::from(*first)))
        }
        _ => {
            let why = format!("`{}` is one CPU, and never several: write &", test.field);
            Err(wrong(test.value_column.0, &why))
        }
    }
}

fn between(field: &Field, first: u64, last: u64) -> Predicate {
    Predicate::All(vec![
        compare(field, Operator::GreaterOrEqual, first),
        compare(field, Operator::LessOrEqual, last),
    ])
}

fn compare(field: &Field, operator: Operator, with: u64) -> Predicate {
    Predicate::Check(Check {
        field: field.clone(),
        with: With::Number(operator, with),
    })
}

/// Returns the comparison of `field` with named values. For a test of bits, any of the values must match; for other
/// operators, all values are combined.
fn by_names(test: &Test, field: &Field, named: &[Named]) -> Result<Predicate, ParseError> {
    if test.operator != Operator::AnyBit {
        let value = named.iter().fold(0, |all, it| all | it.value);
        return Ok(compare(field, test.operator, cut(value, field)));
    }
    let mut any = Vec::new();
    for it in named {
        any.push(match it.mask {
            // The name stands for one value of several bits, as events show it: compare these bits.
            Some(mask) if mask.count_ones() > 1 => {
                within(field, mask, it.value).ok_or_else(|| {
                    let why = format!("`{}` does not have the bits that decide it", test.field);
                    wrong(test.value_column.0, &why)
                })?
            }
            _ if it.value == 0 => {
                let why = "it has no bit that could be set: compare with ==";
                return Err(wrong(test.value_column.0, why));
            }
            _ => compare(field, Operator::AnyBit, cut(it.value, field)),
        });
    }
    Ok(match (any.pop(), any.is_empty()) {
        (Some(only), true) => only,
        (last, _) => Predicate::Any(any.into_iter().chain(last).collect()),
    })
}

/// Returns the check whether the bits of `field` in `mask` equal those of `value`: one comparison for each run
/// of consecutive bits. `None` if the field has none of the bits in `mask`, or lacks some that are set in
/// `value`.
fn within(field: &Field, mask: u64, value: u64) -> Option<Predicate> {
    let Field::Number {
        source, size, bits, ..
    } = field
    else {
        // Only numbers are shown with names of bits.
        return None;
    };
    let (first, width) = bits.map_or((0, size * 8), |bits| (bits.offset, bits.width));
    let there = u64::MAX >> (64 - u32::from(width.clamp(1, 64)));
    let mut rest = mask & there;
    if rest == 0 || value & mask & !there != 0 {
        return None;
    }
    let mut rows = Vec::new();
    while rest != 0 {
        let at = rest.trailing_zeros();
        let len = (rest >> at).trailing_ones();
        let row = u64::MAX >> (64 - len) << at;
        let bits = Bits {
            offset: first.saturating_add(u8::try_from(at).unwrap_or(u8::MAX)),
            width: u8::try_from(len).unwrap_or(u8::MAX),
        };
        let these = Field::Number {
            source: source.clone(),
            size: *size,
            bits: Some(bits),
            signed: false,
        };
        rows.push(compare(&these, Operator::Equal, (value & row) >> at));
        rest &= !row;
    }
    Some(Predicate::All(rows))
}

/// Truncates `value` to the size and sign of `field`, as the kernel does before a comparison
/// (`DEFINE_COMPARISON_PRED` in kernel/trace/trace_events_filter.c): -1, 4294967295 and 0xffffffff are the same
/// `u32`.
fn cut(value: u64, field: &Field) -> u64 {
    let (size, signed) = match field {
        Field::Number { size, signed, .. } => (*size, *signed),
        Field::Pid | Field::Tgid => (4, true),
        Field::Cpu => (4, false),
        Field::Text(_) => return value,
    };
    let above = 64 - 8 * u32::from(size.clamp(1, 8));
    let value = value << above;
    if signed {
        (value.cast_signed() >> above).cast_unsigned()
    } else {
        value >> above
    }
}

fn wrong(column: usize, why: &str) -> ParseError {
    refused(
        column,
        format!("{}; {why}", words::filter::ILLEGAL_FIELD_OP),
    )
}

/// Returns the field that `test` names: an argument, or a field of every event. If its values may have names, also
/// returns its type.
fn field<'a>(
    test: &Test,
    arguments: &'a [Argument],
) -> Result<(Field, Option<&'a Shape>), ParseError> {
    let name = test.field.as_str();
    if let Some(argument) = arguments.iter().find(|argument| argument.name == name) {
        let field = of_argument(argument).ok_or_else(|| {
            let why = format!("`{name}` is neither a number nor a text");
            wrong(test.column.0, &why)
        })?;
        return Ok((field, Some(&argument.shape)));
    }
    let field = match name {
        "pid" | "common_pid" => Field::Pid,
        "tgid" | "common_tgid" => Field::Tgid,
        "cpu" | "CPU" | "common_cpu" => Field::Cpu,
        "comm" | "COMM" => Field::Text(Source::Common(Common::Comm)),
        "common_preempt_count" | "common_flags" => {
            let words = words::filter::FIELD_NOT_FOUND;
            let message = format!(
                "{words}; `{name}` is not known of hits: the kernel has no event there that would record it"
            );
            return Err(refused(test.column.0, message));
        }
        _ => {
            let names: Vec<_> = arguments.iter().map(|it| it.name.as_str()).collect();
            let there = [names.as_slice(), &["pid", "tgid", "comm", "cpu"]].concat();
            let words = words::filter::FIELD_NOT_FOUND;
            let message = format!("{words}; there are {}", there.join(", "));
            return Err(refused(test.column.0, message));
        }
    };
    Ok((field, None))
}

/// Returns an argument as a field, if it is a number or a text.
pub(super) fn of_argument(argument: &Argument) -> Option<Field> {
    let Shape { kind, size, .. } = &argument.shape;
    let source = argument.source.clone();
    let signed = match kind {
        ShapeKind::String => return Some(Field::Text(source)),
        ShapeKind::Array { element, .. } if element.kind == ShapeKind::Char => {
            return Some(Field::Text(source));
        }
        ShapeKind::Signed | ShapeKind::Enum { signed: true, .. } => true,
        ShapeKind::Unsigned
        | ShapeKind::Hex
        | ShapeKind::Char
        | ShapeKind::Bool
        | ShapeKind::Pointer
        | ShapeKind::Symbol
        | ShapeKind::Enum { signed: false, .. } => false,
        ShapeKind::Array { .. }
        | ShapeKind::Struct { .. }
        | ShapeKind::Bytes
        | ShapeKind::Unknown => return None,
    };
    let size = u8::try_from(*size)
        .ok()
        .filter(|size| (1..=8).contains(size))?;
    Some(Field::Number {
        source,
        size,
        bits: argument.bits,
        signed,
    })
}

/// Returns the condition on a register that is equivalent to `predicate`, if there is one. A condition compares all
/// 64 bits of the register, so for a narrower field only `AnyBit` has an equivalent: its mask leaves out the upper
/// bits.
fn condition(predicate: &Predicate) -> Option<Condition> {
    let Predicate::Check(Check {
        field:
            Field::Number {
                source:
                    Source::Registers {
                        registers,
                        entry: false,
                    },
                size,
                bits: None,
                signed,
            },
        with: With::Number(operator, value),
    }) = predicate
    else {
        return None;
    };
    let [register] = *registers.as_slice() else {
        return None;
    };
    let whole = *size == 8;
    let (comparison, value) = match operator {
        Operator::AnyBit => (Comparison::AnyBit, value & (u64::MAX >> (64 - 8 * *size))),
        Operator::Equal if whole => (Comparison::Equal, *value),
        Operator::NotEqual if whole => (Comparison::NotEqual, *value),
        _ if *signed || !whole => return None,
        Operator::Less => (Comparison::Less, *value),
        Operator::LessOrEqual => (Comparison::LessOrEqual, *value),
        Operator::Greater => (Comparison::Greater, *value),
        Operator::GreaterOrEqual => (Comparison::GreaterOrEqual, *value),
        Operator::Equal | Operator::NotEqual | Operator::Glob => return None,
    };
    Some(Condition {
        register,
        comparison,
        value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_has_not_the_bits_of_a_name_is_not_compared_with_it() {
        let field = |size, bits| Field::Number {
            source: Source::Common(Common::Flags),
            size,
            bits,
            signed: false,
        };
        let narrow = Some(Bits {
            offset: 4,
            width: 2,
        });
        for (field, mask, value, rows) in [
            (field(4, None), 0x3, 1, Some(1)),
            (field(4, None), 0x5, 4, Some(2)),
            (field(8, None), 0xc << 60, 4 << 60, Some(1)),
            (field(4, None), u64::MAX, 0, Some(1)),
            (field(1, None), 0x300, 0, None),
            (field(1, None), 0x180, 0x80, Some(1)),
            (field(1, None), 0x180, 0x100, None),
            (field(8, narrow), 0x3, 2, Some(1)),
            (field(8, narrow), 0xc, 0, None),
            (Field::Cpu, 0x3, 1, None),
        ] {
            let found = within(&field, mask, value).map(|found| match found {
                Predicate::All(rows) => rows.len(),
                other => panic!("{other:?}"),
            });
            assert_eq!(found, rows, "{field:?} {mask:#x}");
        }
    }
}
