//! Output of a script for a hit.
//!
//! Invariant: data from a guest is printed without control characters for a terminal. The script's own text may
//! contain them.

use hvprobe_proto::v1::{self, Probe, TypeKind};
use hvprobe_spec::definition::{Kind, Target};
use hvprobe_spec::script::{Builtin, Format, Piece, Planted, Said};
use time::{OffsetDateTime, UtcOffset};

use super::printf::{self, Printed};
use crate::output::events::Label;
use crate::output::events::arguments::HitValues;
use crate::output::harmless;
use crate::output::values::Value;
use crate::output::values::names::Names;

/// Hit of a script's probe.
#[derive(Debug)]
pub(super) struct Hit<'a> {
    pub(super) event: &'a v1::Event,
    pub(super) label: &'a Label,
    pub(super) planted: &'a Planted,
    /// Start time of the script.
    pub(super) began_ns: u64,
}

impl Hit<'_> {
    /// Returns the addresses in `values` whose symbols are printed.
    pub(super) fn addresses(&self, values: &[Said]) -> Vec<u64> {
        let mut addresses = Vec::new();
        for value in values {
            match value {
                Said::Symbol(name) => addresses.extend(self.argument(name).bits()),
                Said::Builtin(Builtin::Kstack) => {
                    let stack = self.label.captures.split(self.event).stack_trace();
                    addresses.extend(stack.into_iter().flat_map(|stack| stack.addresses));
                }
                _ => {}
            }
        }
        addresses
    }

    /// Returns the output of `printf`.
    pub(super) fn printf(&self, format: &Format, values: &[Said], names: &Names) -> String {
        formatted(format, values.iter().map(|value| self.said(value, names)))
    }

    fn said(&self, value: &Said, names: &Names) -> Printed {
        match value {
            Said::Number(number) => Printed::Number((*number).into()),
            Said::Text(text) => Printed::Text(text.clone()),
            Said::Argument(name) => self.argument(name),
            Said::Symbol(name) => match self.argument(name) {
                Printed::Number(number) => {
                    let address = Printed::Number(number).bits().unwrap_or(0);
                    Printed::Text(symbol(address, names))
                }
                text => text,
            },
            Said::Builtin(builtin) => self.builtin(*builtin, names),
            Said::Divided { of, by } => self.said(of, names).divided(*by),
        }
    }

    /// Returns the value of the argument `name`.
    fn argument(&self, name: &str) -> Printed {
        let captured = self.label.captures.split(self.event);
        let values = self.label.arguments.values_of(self.event, &captured.items);
        let mut values = values.into_iter().flat_map(HitValues::values);
        let found = values.find(|(known, _)| *known == name);
        found.map_or_else(
            || Printed::of(&Value::Unknown),
            |(_, value)| Printed::of(&value),
        )
    }

    fn builtin(&self, builtin: Builtin, names: &Names) -> Printed {
        let event = self.event;
        let unknown = || Printed::Text("?".to_owned());
        let of_task = |number: fn(&v1::Task) -> i32| {
            let task = event.task.as_ref();
            task.map_or_else(unknown, |task| Printed::Number(number(task).into()))
        };
        let since = |ns: u64, began: u64| Printed::Number(i128::from(ns) - i128::from(began));
        match builtin {
            Builtin::Pid => of_task(|task| task.tgid),
            Builtin::Tid => of_task(|task| task.pid),
            Builtin::Comm => {
                let comm = event.task.as_ref().map(|task| harmless(&task.comm));
                comm.map_or_else(unknown, Printed::Text)
            }
            Builtin::Cpu => Printed::Number(event.vcpu.into()),
            // A time of 0 means that it is unknown.
            Builtin::Nsecs | Builtin::Elapsed if event.host_ns == 0 => unknown(),
            Builtin::Nsecs => since(event.host_ns, 0),
            Builtin::Elapsed => since(event.host_ns, self.began_ns),
            Builtin::Func => Printed::Text(function(self.label.symbol.as_ref(), self.planted)),
            Builtin::Probe => Printed::Text(probe(self.label.symbol.as_ref(), self.planted)),
            Builtin::Kstack => {
                let stack = self.label.captures.split(event).stack_trace();
                let text = stack.map(|it| format!("{}\n", it.indented("\n        ", names)));
                text.map_or_else(unknown, Printed::Text)
            }
            Builtin::Duration => match event.call.as_ref().map(|call| call.duration_ns) {
                None | Some(0) => unknown(),
                Some(ns) => since(ns, 0),
            },
        }
    }
}

/// Returns the output of a `printf` that does not run at a hit.
pub(super) fn aside(format: &Format, values: &[Said], now_ns: u64, began_ns: u64) -> String {
    let values = values
        .iter()
        .map(|value| said_aside(value, now_ns, began_ns));
    formatted(format, values)
}

fn said_aside(value: &Said, now_ns: u64, began_ns: u64) -> Printed {
    match value {
        Said::Number(number) => Printed::Number((*number).into()),
        Said::Text(text) => Printed::Text(text.clone()),
        Said::Builtin(Builtin::Elapsed) => Printed::Number((now_ns - began_ns).into()),
        Said::Builtin(_) => Printed::Number(now_ns.into()),
        Said::Argument(_) | Said::Symbol(_) => Printed::of(&Value::Unknown),
        Said::Divided { of, by } => said_aside(of, now_ns, began_ns).divided(*by),
    }
}

fn formatted(format: &Format, mut values: impl Iterator<Item = Printed>) -> String {
    let pieces = format.pieces.iter().map(|piece| match piece {
        Piece::Text(text) => text.clone(),
        Piece::Directive(directive) => {
            let value = values.next();
            value.map_or_else(String::new, |value| printf::text(directive, &value))
        }
    });
    pieces.collect()
}

/// Returns the symbol at `address` in bpftrace's format.
pub(super) fn symbol(address: u64, names: &Names) -> String {
    let symbol = names.symbol(address);
    symbol.map_or_else(|| format!("{address:#x}"), |(name, _)| name.to_owned())
}

/// Returns the name of the probed function: from `symbol` if that is known, or else the target of the definition.
pub(super) fn function(symbol: Option<&(String, u64)>, planted: &Planted) -> String {
    match symbol {
        Some((name, _)) => name.clone(),
        None => planted.definition.target.to_string(),
    }
}

/// Returns a probe in the syntax of scripts. A probe that was generated from a pattern is named after its function,
/// from `symbol` if that is known. Other probes are named after their definition: `symbol` would add an offset to a
/// function's name, because a probe at the entry is planted after the entry's marker, such as `endbr64`.
pub(super) fn probe(symbol: Option<&(String, u64)>, planted: &Planted) -> String {
    let kind = match planted.definition.kind {
        Kind::Probe => "kprobe",
        Kind::Return { .. } => "kretprobe",
    };
    let target = match planted.definition.target.clone() {
        Target::Functions { .. } => function(symbol, planted),
        Target::Symbol {
            module,
            name,
            offset: offset @ 1..,
        } => {
            let offset = format!("+{offset}");
            let symbol = Target::Symbol {
                module,
                name,
                offset: 0,
            };
            format!("{symbol}{offset}")
        }
        target => target.to_string(),
    };
    format!("{kind}:{target}")
}

/// Formats `now`, in UTC, as the script's `time` prints it.
pub(super) fn time(format: &str, now: OffsetDateTime) -> String {
    let now = now.to_offset(UtcOffset::UTC);
    let month = u8::from(now.month());
    let clock = format!("{:02}:{:02}:{:02}", now.hour(), now.minute(), now.second());
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        match rest.next() {
            Some('H') => text.push_str(&format!("{:02}", now.hour())),
            Some('M') => text.push_str(&format!("{:02}", now.minute())),
            Some('S') => text.push_str(&format!("{:02}", now.second())),
            Some('T') => text.push_str(&clock),
            Some('Y') => text.push_str(&now.year().to_string()),
            Some('m') => text.push_str(&format!("{month:02}")),
            Some('d') => text.push_str(&format!("{:02}", now.day())),
            Some('F') => text.push_str(&format!("{}-{month:02}-{:02}", now.year(), now.day())),
            Some('j') => text.push_str(&format!("{:03}", now.ordinal())),
            Some('s') => text.push_str(&now.unix_timestamp().to_string()),
            Some(c) => text.push(c),
            None => {}
        }
    }
    text
}

/// Returns `probe` with its enumeration arguments converted to plain numbers, because a script prints enumerations
/// as numbers.
pub(super) fn in_numbers(mut probe: Probe) -> Probe {
    for argument in &mut probe.arguments {
        if let Some(ty) = &mut argument.r#type
            && ty.kind() == TypeKind::Enum
        {
            let kind = match ty.signed {
                true => TypeKind::Signed,
                false => TypeKind::Unsigned,
            };
            ty.kind = kind.into();
            ty.enumerators.clear();
        }
    }
    probe
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use hvprobe_proto::v1::argument::Source;
    use hvprobe_proto::v1::{Argument, ArgumentRegisters, Call, Register, SymbolOffset, Type};
    use hvprobe_spec::script::{Action, compile, read_script};

    use super::*;
    use crate::output::events::Labels;
    use crate::output::events::lines::tests::hit;

    /// Returns the output of the first probe of `text` at a hit of `vfs_read`.
    fn printed(text: &str) -> String {
        let program = compile(text, &read_script(text).unwrap()).unwrap();
        let planted = &program.probes[0];
        let argument = |name: &str, register: Register, kind: TypeKind| Argument {
            name: name.to_owned(),
            source: Some(Source::Registers(ArgumentRegisters {
                registers: vec![register.into()],
                entry: false,
            })),
            r#type: Some(Type {
                size: 8,
                kind: kind.into(),
                signed: true,
                enumerators: vec![v1::Enumerator {
                    name: "ONE".into(),
                    value: 1,
                    mask: None,
                }],
                ..Default::default()
            }),
            ..Default::default()
        };
        let probe = Probe {
            id: 1,
            name: "p_vfs_read_0".into(),
            symbol: Some(SymbolOffset {
                name: "vfs_read".into(),
                offset: 4,
            }),
            arguments: vec![
                argument("arg0", Register::Rdi, TypeKind::Signed),
                argument("args_mode", Register::Rdx, TypeKind::Enum),
            ],
            ..Default::default()
        };
        let mut labels = Labels::default();
        labels.learn(&[in_numbers(probe)]);
        let mut event = hit();
        event.call = Some(Box::new(Call {
            duration_ns: 250,
            ..Default::default()
        }));
        let hit = Hit {
            event: &event,
            label: &labels.of(1),
            planted,
            began_ns: 1_234_567_890_000,
        };
        let mut names = Names::default();
        names.insert(
            0xffff_8880_0312_3400,
            Some(("table", 0xffff_8880_0312_3000)),
        );
        let said = planted.actions.iter().map(|action| match action {
            Action::Printf { format, values } => {
                let looked_up = hit.addresses(values);
                assert!(looked_up.iter().all(|at| *at == 0xffff_8880_0312_3400));
                hit.printf(format, values, &names)
            }
            other => panic!("{other:?}"),
        });
        said.collect()
    }

    #[test]
    fn values_of_a_hit_are_printed_by_the_format() {
        expect![[r#"
            dd[123/123] on 0: vfs_read kprobe:vfs_read
            0xffff888003123400 table 1|    a|ff 123
        "#]]
        .assert_eq(&printed(
            r#"kprobe:vfs_read {
                printf("%s[%d/%d] on %d: %s %s\n", comm, pid, tid, cpu, func, probe);
                printf("%p %s %d|%5s|%x %d\n", arg0, ksym(arg0), args.mode, "a", 255, elapsed);
            }"#,
        ));
        expect![[r#"
            kretprobe:vfs_read took 250, ? ?
        "#]].assert_eq(&printed(
            r#"kretprobe:vfs_read { printf("%s took %d, %s %d\n", probe, duration, kstack, arg3); }"#,
        ));
    }

    #[test]
    fn probes_are_printed_as_they_are_written() {
        for (point, expected) in [
            ("kprobe:vfs_read", "kprobe:vfs_read"),
            ("k:m:vfs_read+0x10", "kprobe:m:vfs_read+16"),
            ("kr:vfs_*", "kretprobe:vfs_read"),
        ] {
            assert_eq!(
                printed(&format!("{point} {{ printf(\"%s\", probe); }}")),
                expected
            );
        }
    }

    #[test]
    fn times_are_those_of_utc() {
        let at = OffsetDateTime::from_unix_timestamp(1_700_000_003).unwrap();
        expect!["2023-11-14 22:13:23 22:13:23 318 1700000003 100%"]
            .assert_eq(&time("%F %H:%M:%S %T %j %s 100%%", at));
        assert_eq!(time("%Y/%m/%d", at), "2023/11/14");
    }

    #[test]
    fn what_is_printed_aside_has_no_hit() {
        let text = r#"BEGIN { printf("%d %s %d\n", elapsed, "a", -3); }"#;
        let program = compile(text, &read_script(text).unwrap()).unwrap();
        match &program.begin[0] {
            Action::Printf { format, values } => {
                assert_eq!(aside(format, values, 30, 10), "20 a -3\n");
            }
            other => panic!("{other:?}"),
        }
    }
}
