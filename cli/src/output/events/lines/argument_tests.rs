//! Tests of lines for probes whose hits have values.

use expect_test::{Expect, expect};
use hvprobe_proto::v1::{EventField, Register, TypeKind, argument::Source, item};

use super::tests::{hit, returned, shown};
use super::*;
use crate::output::events::arguments::tests::{argument, in_registers, int};
use crate::output::values::decode::tests::plain;

/// Returns the argument for a function's result.
fn result(ty: v1::Type) -> v1::Argument {
    argument("$retval", Source::Field(EventField::Retval.into()), ty)
}

/// Returns a probe of `do_sys_openat2` with its first arguments, as they are at the entry.
fn opens(call: bool, name: &str) -> v1::Probe {
    let returns = name.starts_with('r');
    let pointer = plain("const char *", 8, TypeKind::Pointer);
    v1::Probe {
        id: 1,
        name: name.into(),
        symbol: Some(v1::SymbolOffset {
            name: "do_sys_openat2".into(),
            offset: 0,
        }),
        actions: Some(v1::Actions {
            registers: Some(v1::RegisterSet::default()),
            ..Default::default()
        }),
        arguments: vec![
            argument("dfd", in_registers(&[Register::Rdx], returns), int()),
            argument("filename", in_registers(&[Register::Rsi], returns), pointer),
        ],
        call,
        ..Default::default()
    }
}

/// Checks the part of the line after the time.
fn check(event: &v1::Event, probe: v1::Probe, expected: Expect) {
    let mut labels = Labels::default();
    labels.learn(&[probe]);
    let line = shown(event, &labels);
    let (_, shown) = line.split_once("567890: ").unwrap();
    expected.assert_eq(shown);
}

#[test]
fn call_is_shown_as_c_writes_it() {
    check(
        &hit(),
        opens(true, "p_do_sys_openat2_0"),
        expect!["p_do_sys_openat2_0: do_sys_openat2(dfd=1, filename=0x7fff12345000)"],
    );
    let mut nothing = opens(true, "p");
    nothing.arguments.clear();
    check(&hit(), nothing, expect!["p: do_sys_openat2()"]);
    let mut unknown = opens(true, "p");
    unknown.symbol = None;
    check(
        &hit(),
        unknown,
        expect!["p: 0xffffffff81234560(dfd=1, filename=0x7fff12345000)"],
    );
    let mut inside = opens(true, "p");
    inside.symbol.as_mut().unwrap().offset = 4;
    check(
        &hit(),
        inside,
        expect!["p: do_sys_openat2+0x4(dfd=1, filename=0x7fff12345000)"],
    );
}

#[test]
fn result_stands_behind_its_call() {
    let probe = |ty| {
        let mut probe = opens(true, "r");
        probe.arguments.push(result(ty));
        probe
    };
    check(
        &returned(3),
        probe(int()),
        expect!["r: do_sys_openat2(dfd=1, filename=0x7fff12345000) = 3 took=12.345us"],
    );
    // The upper half of an `int` is ignored.
    check(
        &returned(0xffff_fffe),
        probe(int()),
        expect!["r: do_sys_openat2(dfd=1, filename=0x7fff12345000) = -ENOENT took=12.345us"],
    );
    check(
        &returned(12_u64.wrapping_neg()),
        probe(plain("struct file *", 8, TypeKind::Pointer)),
        expect!["r: do_sys_openat2(dfd=1, filename=0x7fff12345000) = -ENOMEM took=12.345us"],
    );
    check(
        &returned(12_u64.wrapping_neg()),
        probe(plain("unsigned long", 8, TypeKind::Unsigned)),
        expect![
            "r: do_sys_openat2(dfd=1, filename=0x7fff12345000) = 18446744073709551604 took=12.345us"
        ],
    );
    // A function without a result.
    let mut event = returned(3);
    if let Some(call) = &mut event.call {
        call.duration_ns = 0;
    }
    check(
        &event,
        opens(true, "r"),
        expect!["r: do_sys_openat2(dfd=1, filename=0x7fff12345000) took=?"],
    );
}

#[test]
fn other_values_stand_where_ftrace_has_them() {
    check(
        &hit(),
        opens(false, "p"),
        expect!["p: (do_sys_openat2+0x0) dfd=1 filename=0x7fff12345000"],
    );
    let mut probe = opens(false, "r");
    probe.arguments.push(result(int()));
    check(
        &returned(2_u64.wrapping_neg()),
        probe,
        expect![
            "r: (0xffffffff81234560 <- do_sys_openat2) ret=0xfffffffffffffffe (-ENOENT) took=12.345us dfd=1 filename=0x7fff12345000 $retval=-2"
        ],
    );
}

#[test]
fn registers_that_were_asked_for_stand_behind_the_values() {
    let with = |call, registers: Option<&[Register]>| {
        let mut probe = opens(call, "p");
        if let Some(actions) = &mut probe.actions {
            actions.registers = registers.map(|registers| v1::RegisterSet {
                registers: registers.iter().map(|&each| each.into()).collect(),
            });
        }
        probe
    };
    let mut event = hit();
    event.registers = Some(v1::Registers {
        rdi: None,
        ..event.registers.unwrap()
    });
    let chosen = [Register::R15, Register::Rdx];
    check(
        &event,
        with(true, Some(&chosen)),
        expect!["p: do_sys_openat2(dfd=1, filename=0x7fff12345000) rdx=0x1 r15=0x0"],
    );
    check(
        &event,
        with(false, Some(&chosen)),
        expect!["p: (do_sys_openat2+0x0) dfd=1 filename=0x7fff12345000 rdx=0x1 r15=0x0"],
    );
    check(
        &hit(),
        with(false, None),
        expect![
            "p: (do_sys_openat2+0x0) dfd=1 filename=0x7fff12345000 rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1"
        ],
    );
}

#[test]
fn captures_that_are_values_are_not_shown_twice() {
    let mut probe = opens(true, "p");
    let fetched = v1::Item {
        what: Some(item::What::Fetched(v1::FetchedItem {
            base: Some(v1::fetched_item::Base::Register(Register::Rsi.into())),
            pointers: vec![v1::Pointer::default()],
            read: Some(v1::fetched_item::Read::Text(32)),
        })),
    };
    let stack = v1::Item {
        what: Some(item::What::Stack(1)),
    };
    if let Some(actions) = &mut probe.actions {
        actions.capture = vec![stack, fetched.clone(), fetched];
    }
    let text = plain("char[]", 0, TypeKind::String);
    probe
        .arguments
        .push(argument("name", Source::Item(1), text));
    let mut event = hit();
    event.captured = [&5_u64.to_le_bytes()[..], b"\x04\0/etc", b"\x02\x80ab"]
        .concat()
        .into();
    check(
        &event,
        probe.clone(),
        expect![[
            r#"p: do_sys_openat2(dfd=1, filename=0x7fff12345000, name="/etc") $stack1=0x5 +0(%si)="ab"..."#
        ]],
    );
    event.unreadable = 0b110;
    check(
        &event,
        probe,
        expect![
            "p: do_sys_openat2(dfd=1, filename=0x7fff12345000, name=(fault)) $stack1=0x5 +0(%si)=(fault)"
        ],
    );
}

#[test]
fn posts_and_faults_have_no_values() {
    let mut event = hit();
    event.kind = EventKind::Post.into();
    event.registers = Some(v1::Registers {
        rdx: Some(1),
        rip: 0x10,
        ..Default::default()
    });
    check(
        &event,
        opens(true, "p"),
        expect!["p: (do_sys_openat2+0x0) post rip=0x10 rdx=0x1"],
    );
    event.kind = EventKind::Fault.into();
    check(
        &event,
        opens(true, "p"),
        expect!["p: (do_sys_openat2+0x0) fault #DE rdx=0x1"],
    );
}
