//! Resolves histograms: field names become keys and values of an event.
//!
//! Invariant: a field is an argument of the probe or a field of every event, and becomes a key only in a form
//! that fits it; anything else is refused at its column.

use std::num::NonZeroU64;

use hvprobe_spec::aggregate::{Aggregate, Measured, Part};
use hvprobe_spec::fetch::words;
use hvprobe_spec::histogram::{Histogram, Key, KeyForm, Value};
use hvprobe_spec::predicate::Field;
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{Argument, Common, ParseError, ProbeId, Source};

use super::filter;
use super::refused::refused;
use super::types::named;

/// The events whose fields are looked up.
#[derive(Clone, Copy)]
pub(crate) struct Events<'a> {
    pub(crate) probe: ProbeId,
    /// Whether they are events of returns.
    pub(crate) returns: bool,
    pub(crate) arguments: &'a [Argument],
    /// Index of the captured item that is the kernel's stack.
    pub(crate) stack_trace: Option<usize>,
}

/// Resolves `histogram` for the events of one probe.
pub(crate) fn resolve(histogram: &Histogram, of: Events<'_>) -> Result<Aggregate, ParseError> {
    let keys = histogram.keys.iter().map(|key| part(key, of));
    let values = histogram.values.iter().map(|value| summed(value, of));
    let filter = histogram.filter.as_ref();
    Ok(Aggregate {
        keys: keys.collect::<Result<_, _>>()?,
        values: values.collect::<Result<_, _>>()?,
        filter: filter
            .map(|filter| filter::predicate(filter, of.arguments, None))
            .transpose()?,
    })
}

fn part(key: &Key, of: Events<'_>) -> Result<Part, ParseError> {
    let (measured, shape) = measured(key.column.0, &key.field, of)?;
    let is_task = matches!(measured, Measured::Field(Field::Pid | Field::Tgid));
    let is_time = matches!(measured, Measured::Time | Measured::Duration);
    let is_text = matches!(measured, Measured::Field(Field::Text(_)));
    let is_stack = matches!(measured, Measured::StackTrace(_));
    let why = match key.form {
        _ if key.per.is_some() && (is_text || is_stack) => Some("only numbers can be divided"),
        KeyForm::Plain => None,
        _ if is_stack => Some("a stack is a key as it is"),
        KeyForm::ExecName => (!is_task).then_some("execname belongs to common_pid and common_tgid"),
        KeyForm::Usecs => (!is_time).then_some("usecs belongs to common_timestamp and duration"),
        KeyForm::Hex
        | KeyForm::Symbol
        | KeyForm::SymbolOffset
        | KeyForm::Log2
        | KeyForm::Bits
        | KeyForm::Buckets(_) => is_text.then_some("a text is a key as it is"),
    };
    match why {
        Some(why) => Err(refused(key.column.0, format!("`{}`: {why}", key.field))),
        None => Ok(Part {
            // A quotient of flags or of an address is neither flags nor an address.
            shape: match key.per {
                Some(_) => quotient(&measured),
                None => shape,
            },
            of: divided(measured, key.per),
            form: key.form,
        }),
    }
}

fn summed(value: &Value, of: Events<'_>) -> Result<Measured, ParseError> {
    let column = value.column.0;
    let what = match measured(column, &value.field, of)?.0 {
        Measured::Field(Field::Text(_)) => "text",
        Measured::StackTrace(_) => "stack",
        measured => return Ok(divided(measured, value.per)),
    };
    let why = "only numbers are added up";
    Err(refused(
        column,
        format!("`{}` is a {what}: {why}", value.field),
    ))
}

fn divided(of: Measured, per: Option<NonZeroU64>) -> Measured {
    match per {
        Some(by) => Measured::Divided {
            of: Box::new(of),
            by,
        },
        None => of,
    }
}

/// Resolves the field `name` at `column`; returns it with its type.
fn measured(column: usize, name: &str, of: Events<'_>) -> Result<(Measured, Shape), ParseError> {
    if let Some(argument) = of.arguments.iter().find(|argument| argument.name == name) {
        let field = filter::of_argument(argument)
            .ok_or_else(|| refused(column, format!("`{name}` is neither a number nor a text")))?;
        return Ok((Measured::Field(field), argument.shape.clone()));
    }
    let number = |source, size| Field::Number {
        source,
        size,
        bits: None,
        signed: false,
    };
    let (field, kind, size, ty) = match name {
        "pid" | "common_pid" => (Field::Pid, ShapeKind::Signed, 4, "int"),
        "tgid" | "common_tgid" => (Field::Tgid, ShapeKind::Signed, 4, "int"),
        "cpu" | "common_cpu" => (Field::Cpu, ShapeKind::Unsigned, 4, "unsigned int"),
        "comm" | "common_comm" => {
            let comm = Field::Text(Source::Common(Common::Comm));
            (comm, ShapeKind::String, 16, "char[16]")
        }
        "ip" | "common_ip" => {
            let ip = number(Source::Common(Common::Ip), 8);
            (ip, ShapeKind::Pointer, 8, "void *")
        }
        "probe" => {
            let id = Source::Constant(of.probe.0.to_le_bytes().to_vec());
            (number(id, 4), ShapeKind::Unsigned, 4, "unsigned int")
        }
        "common_timestamp" => return Ok((Measured::Time, nanoseconds())),
        "duration" if of.returns => return Ok((Measured::Duration, nanoseconds())),
        "duration" => return Err(refused(column, "only calls that return have a duration")),
        "stacktrace" | "common_stacktrace" => {
            let Some(item) = of.stack_trace else {
                return Err(refused(column, "the probe does not record stacks"));
            };
            let addresses = named("unsigned long[]", 0, ShapeKind::Bytes);
            return Ok((Measured::StackTrace(item), addresses));
        }
        _ => {
            let arguments = of.arguments.iter().map(|it| it.name.as_str());
            let there: Vec<_> = arguments.chain(EVERY).collect();
            let words = words::filter::FIELD_NOT_FOUND;
            let message = format!("{words}; there are {}", there.join(", "));
            return Err(refused(column, message));
        }
    };
    Ok((Measured::Field(field), named(ty, size, kind)))
}

/// Names of the fields of every event.
const EVERY: [&str; 7] = [
    "common_pid",
    "common_tgid",
    "common_cpu",
    "common_timestamp",
    "comm",
    "ip",
    "probe",
];

/// Returns the type of a quotient.
fn quotient(of: &Measured) -> Shape {
    match of.is_signed() {
        true => named("long", 8, ShapeKind::Signed),
        false => named("unsigned long", 8, ShapeKind::Unsigned),
    }
}

fn nanoseconds() -> Shape {
    named("unsigned long", 8, ShapeKind::Unsigned)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use hvprobe_arch::regs::Gpr;
    use hvprobe_spec::histogram::read_histogram;

    use super::*;

    fn argument(name: &str, kind: ShapeKind) -> Argument {
        Argument {
            name: name.to_owned(),
            source: Source::Registers {
                registers: vec![Gpr::Rdi],
                entry: false,
            },
            bits: None,
            shape: Shape {
                name: "it".to_owned(),
                size: 8,
                kind,
            },
        }
    }

    fn check(returns: bool, text: &str, expected: Expect) {
        let arguments = [
            argument("count", ShapeKind::Unsigned),
            argument("path", ShapeKind::String),
            argument("raw", ShapeKind::Bytes),
        ];
        let of = Events {
            probe: ProbeId(7),
            returns,
            arguments: &arguments,
            stack_trace: returns.then_some(3),
        };
        let found = match resolve(&read_histogram(text).unwrap(), of) {
            Ok(Aggregate {
                keys,
                values,
                filter,
            }) => {
                let keys: Vec<_> = keys.iter().map(|key| (&key.of, &key.shape.name)).collect();
                format!("{keys:?} {values:?} {}", filter.is_some())
            }
            Err(error) => format!("{}\n{error}", error.render(text)),
        };
        expected.assert_eq(&found);
    }

    #[test]
    fn fields_are_arguments_or_what_every_event_has() {
        check(
            true,
            "keys=path,common_pid.execname,duration.log2:vals=count,duration if count > 1",
            expect![[
                r#"[(Field(Text(Registers { registers: [Rdi], entry: false })), "it"), (Field(Pid), "int"), (Duration, "unsigned long")] [Field(Number { source: Registers { registers: [Rdi], entry: false }, size: 8, bits: None, signed: false }), Duration] true"#
            ]],
        );
        check(
            false,
            "keys=probe,cpu,comm,ip.sym,common_timestamp.usecs",
            expect![[
                r#"[(Field(Number { source: Constant([7, 0, 0, 0]), size: 4, bits: None, signed: false }), "unsigned int"), (Field(Cpu), "unsigned int"), (Field(Text(Common(Comm))), "char[16]"), (Field(Number { source: Common(Ip), size: 8, bits: None, signed: false }), "void *"), (Time, "unsigned long")] [] false"#
            ]],
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused_at_its_column() {
        for (text, expected) in [
            (
                "keys=size",
                expect![[r#"
                    keys=size
                         ^
                    Field not found; there are count, path, raw, common_pid, common_tgid, common_cpu, common_timestamp, comm, ip, probe"#]],
            ),
            (
                "keys=raw",
                expect![[r#"
                    keys=raw
                         ^
                    `raw` is neither a number nor a text"#]],
            ),
            (
                "keys=cpu:vals=path",
                expect![[r#"
                    keys=cpu:vals=path
                                  ^
                    `path` is a text: only numbers are added up"#]],
            ),
            (
                "keys=cpu,path.log2",
                expect![[r#"
                    keys=cpu,path.log2
                             ^
                    `path`: a text is a key as it is"#]],
            ),
            (
                "keys=count.execname",
                expect![[r#"
                    keys=count.execname
                         ^
                    `count`: execname belongs to common_pid and common_tgid"#]],
            ),
            (
                "keys=duration",
                expect![[r#"
                    keys=duration
                         ^
                    only calls that return have a duration"#]],
            ),
            (
                "keys=stacktrace",
                expect![[r#"
                    keys=stacktrace
                         ^
                    the probe does not record stacks"#]],
            ),
            (
                "keys=cpu if size == 1",
                expect![[r#"
                    keys=cpu if size == 1
                                ^
                    Field not found; there are count, path, raw, pid, tgid, comm, cpu"#]],
            ),
        ] {
            check(false, text, expected);
        }
    }
}
