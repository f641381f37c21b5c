use hvprobe_proto::v1::{EventField, Register, TypeKind, argument};

use super::*;
use crate::output::events::captured::Captures;
use crate::output::values::decode::tests::{array, enumeration, member, plain, structure};
use crate::output::values::names::Names;
use crate::output::values::value_text;

pub(crate) fn argument(name: &str, source: argument::Source, ty: v1::Type) -> v1::Argument {
    v1::Argument {
        name: name.into(),
        source: Some(source),
        bits: None,
        r#type: Some(ty),
    }
}

pub(crate) fn in_registers(registers: &[Register], entry: bool) -> argument::Source {
    argument::Source::Registers(v1::ArgumentRegisters {
        registers: registers.iter().map(|&each| each.into()).collect(),
        entry,
    })
}

pub(crate) fn int() -> v1::Type {
    plain("int", 4, TypeKind::Signed)
}

/// Returns the values of `event` as text.
fn texts(probe: &v1::Probe, event: &v1::Event) -> Option<Vec<String>> {
    let captures = Captures::of(probe);
    let arguments = Arguments::of(probe);
    let captured = captures.split(event);
    let values = arguments.values_of(event, &captured.items)?.values();
    let text = |(name, value)| format!("{name}={}", value_text::text(&value, &Names::default()));
    Some(values.into_iter().map(text).collect())
}

fn with(arguments: Vec<v1::Argument>) -> v1::Probe {
    v1::Probe {
        arguments,
        ..Default::default()
    }
}

#[test]
fn values_are_found_in_registers() {
    let pair = structure(
        16,
        vec![
            member("low", 0, None, plain("u64", 8, TypeKind::Unsigned)),
            member("high", 64, None, int()),
        ],
    );
    let probe = with(vec![
        argument("now", in_registers(&[Register::Rdi], false), int()),
        argument("then", in_registers(&[Register::Rdi], true), int()),
        argument(
            "pair",
            in_registers(&[Register::Rsi, Register::Rdx], false),
            pair.clone(),
        ),
        argument("missing", in_registers(&[Register::Rcx], false), int()),
        argument("half", in_registers(&[Register::Rsi], false), pair.clone()),
        argument(
            "half2",
            in_registers(&[Register::Rsi, Register::Rcx], false),
            pair,
        ),
        argument("none", in_registers(&[], false), int()),
        argument("many", in_registers(&[Register::Rdi; 1000], false), int()),
    ]);
    let registers = |rdi| {
        Some(v1::Registers {
            rdi: Some(rdi),
            rsi: Some(5),
            rdx: Some(6),
            ..Default::default()
        })
    };
    let mut event = v1::Event {
        registers: registers(0xffff_ff9c),
        ..Default::default()
    };
    assert_eq!(
        texts(&probe, &event).unwrap().join(" "),
        "now=-100 then=? pair={low=5, high=6} missing=? half=? half2=? none=? many=-100"
    );
    event.call = Some(Box::new(v1::Call {
        entry: registers(7),
        ..Default::default()
    }));
    assert_eq!(texts(&probe, &event).unwrap()[1], "then=7");
    event.registers = None;
    assert_eq!(texts(&probe, &event).unwrap()[0], "now=?");
}

#[test]
fn a_result_in_two_registers_is_that_of_the_call() {
    let long = || plain("long", 8, TypeKind::Signed);
    let time = structure(
        16,
        vec![
            member("tv_sec", 0, None, long()),
            member("tv_nsec", 64, None, long()),
        ],
    );
    let mut probe = with(vec![
        argument("inode", in_registers(&[Register::Rdi], true), int()),
        argument(
            "retval",
            in_registers(&[Register::Rax, Register::Rdx], false),
            time,
        ),
    ]);
    probe.call = true;
    let mut event = v1::Event {
        kind: EventKind::Return.into(),
        registers: Some(v1::Registers {
            rax: Some(7),
            rdx: Some(9),
            ..Default::default()
        }),
        ..Default::default()
    };
    let result = |event: &v1::Event| match Arguments::of(&probe).values_of(event, &[]) {
        Some(HitValues::Call { arguments, result }) => {
            let text = |(_, value)| value_text::text(&value, &Names::default());
            (arguments.len(), result.map(text))
        }
        other => panic!("{other:?}"),
    };
    let text = "{tv_sec=7, tv_nsec=9}".to_owned();
    assert_eq!(result(&event), (1, Some(text)));
    // At the entry, the registers contain the arguments, not the result.
    event.kind = EventKind::Hit.into();
    assert_eq!(result(&event), (2, None));
}

#[test]
fn values_are_found_in_what_was_captured() {
    let items = |read| v1::Item {
        what: Some(v1::item::What::Fetched(v1::FetchedItem {
            read: Some(read),
            ..Default::default()
        })),
    };
    let bytes = items(v1::fetched_item::Read::Bytes(8));
    let text = items(v1::fetched_item::Read::Text(64));
    let item = argument::Source::Item;
    let name = plain("char[8]", 0, TypeKind::String);
    let mut part = argument("part", item(0), int());
    part.bits = Some(v1::Bits {
        offset: 4,
        width: 8,
    });
    let mut probe = with(vec![
        argument("chars", item(0), array(plain("char", 1, TypeKind::Char), 8)),
        part,
        argument("text", item(1), name.clone()),
        argument("beyond", item(2), name.clone()),
        argument("far", item(u32::MAX), name),
        argument(
            "flags",
            item(0),
            enumeration(1, false, &[("A", 1), ("B", 2)]),
        ),
    ]);
    probe.actions = Some(v1::Actions {
        capture: vec![bytes],
        capture_at_return: vec![text],
        ..Default::default()
    });
    let mut event = v1::Event {
        captured: b"\x03!\0\0\0\0\0\0\x02\x80ab".to_vec().into(),
        ..Default::default()
    };
    assert_eq!(
        texts(&probe, &event).unwrap().join(" "),
        r#"chars="\x03!" part=16 text="ab"... beyond=? far=? flags=A|B"#
    );
    event.unreadable = 0b11;
    let faults = texts(&probe, &event).unwrap().join(" ");
    assert_eq!(
        faults,
        "chars=(fault) part=(fault) text=(fault) beyond=? far=? flags=(fault)"
    );
    event.captured.truncate(11);
    event.unreadable = 0;
    assert_eq!(texts(&probe, &event).unwrap()[2], "text=?");
    event.captured.clear();
    assert_eq!(texts(&probe, &event).unwrap()[0], "chars=?");
}

#[test]
fn values_are_found_in_what_every_event_has() {
    let field = |field: EventField| argument::Source::Field(field.into());
    let long = || plain("u64", 8, TypeKind::Hex);
    let probe = with(vec![
        argument(
            "comm",
            field(EventField::Comm),
            plain("char[16]", 0, TypeKind::String),
        ),
        argument("ip", field(EventField::Ip), long()),
        argument("flags", field(EventField::Flags), long()),
        argument("ret", field(EventField::Retval), int()),
        argument("newer", argument::Source::Field(77), int()),
        argument(
            "constant",
            argument::Source::Constant(b"text".to_vec()),
            plain("char[]", 0, TypeKind::String),
        ),
        v1::Argument {
            source: None,
            ..argument("nowhere", field(EventField::Ip), int())
        },
        v1::Argument {
            r#type: None,
            ..argument("nothing", field(EventField::Ip), int())
        },
    ]);
    let mut event = v1::Event {
        registers: Some(v1::Registers {
            rip: 0x10,
            rflags: 0x246,
            ..Default::default()
        }),
        task: Some(v1::Task {
            comm: b"a\x1bb".to_vec().into(),
            ..Default::default()
        }),
        call: Some(Box::new(v1::Call {
            value: 2_u64.wrapping_neg(),
            ..Default::default()
        })),
        ..Default::default()
    };
    assert_eq!(
        texts(&probe, &event).unwrap().join(" "),
        r#"comm="a\x1bb" ip=0x10 flags=0x246 ret=-2 newer=? constant="text" nowhere=? nothing=?"#
    );
    event.task = None;
    event.call = None;
    let texts = texts(&probe, &event).unwrap();
    assert_eq!(
        (texts[0].as_str(), texts[3].as_str()),
        ("comm=(fault)", "ret=?")
    );
}

#[test]
fn hits_and_returns_have_values_and_nothing_else_has() {
    let mut probe = with(vec![argument(
        "a",
        in_registers(&[Register::Rdi], false),
        int(),
    )]);
    let event = |kind: EventKind| v1::Event {
        kind: kind.into(),
        ..Default::default()
    };
    for (kind, has) in [
        (EventKind::Hit, true),
        (EventKind::Return, true),
        (EventKind::Post, false),
        (EventKind::Fault, false),
    ] {
        assert_eq!(texts(&probe, &event(kind)).is_some(), has, "{kind:?}");
    }
    probe.arguments.clear();
    let hit = event(EventKind::Hit);
    assert_eq!(texts(&probe, &hit), None);
    // A function without arguments.
    probe.call = true;
    assert_eq!(texts(&probe, &hit), Some(Vec::new()));
}

#[test]
fn no_name_steers_a_terminal() {
    let ty = structure(
        1,
        vec![member(
            "m\x1b",
            0,
            None,
            enumeration(1, false, &[("A\x1b", 0)]),
        )],
    );
    let source = argument::Source::Constant(vec![0]);
    let probe = with(vec![argument("n\x1b", source, array(ty, 1))]);
    let texts = texts(&probe, &v1::Event::default()).unwrap();
    assert_eq!(texts, ["n?={{m?=A?}}"]);
}
