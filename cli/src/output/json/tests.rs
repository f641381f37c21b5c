use expect_test::{Expect, expect};
use hvprobe_proto::v1::argument::Source;

use super::*;
use crate::output::events::arguments::Arguments;
use crate::output::events::arguments::tests::{argument, in_registers, int};
use crate::output::events::captured::{self, Captures};
use crate::output::events::lines::tests::{hit, returned};
use crate::output::values::decode::tests::plain;

fn check(line: &Line<'_>, expected: Expect) {
    expected.assert_eq(&serde_json::to_string(line).unwrap());
}

/// Returns the line for an event of `vm0`.
fn written(event: &v1::Event, label: &Label, anchor: Option<&v1::Anchor>) -> String {
    let line = Line::Event(Hit {
        machine: "vm0",
        event,
        label,
        anchor,
        names: &Names::default(),
    });
    serde_json::to_string(&line).unwrap()
}

#[test]
fn hit_has_all_registers_in_hexadecimal() {
    let label = Label {
        name: "reads".into(),
        symbol: Some(("vfs_read".into(), 4)),
        ..Label::default()
    };
    let anchor = v1::Anchor {
        monotonic_ns: 1_000_000_000_000,
        realtime_ns: 1_700_000_000_000_000_000,
    };
    expect![[
        r#"{"type":"event","machine":"vm0","seq":41,"probe":1,"event":"reads","symbol":"vfs_read","offset":4,"vcpu":0,"host_ns":1234567890123,"realtime_ns":1700000234567890123,"guest_tsc":"0x123456789","pid":123,"tgid":123,"comm":"dd","cost_ns":2100,"kind":"hit","registers":{"rax":"0x0","rbx":"0x0","rcx":"0x0","rdx":"0x1","rsi":"0x7fff12345000","rdi":"0xffff888003123400","rsp":"0x0","rbp":"0x0","r8":"0x0","r9":"0x0","r10":"0x0","r11":"0x0","r12":"0x0","r13":"0x0","r14":"0x0","r15":"0x0","rip":"0xffffffff81234560","rflags":"0x246"},"fault":null,"call":null,"captured":[],"stack":null,"stack_complete":null,"args":null}"#
    ]]
    .assert_eq(&written(&hit(), &label, Some(&anchor)));
}

#[test]
fn return_has_its_call_and_captures_are_printed_one_by_one() {
    let label = Label {
        name: "r_vfs_read_0".into(),
        symbol: Some(("vfs_read".into(), 0)),
        captures: Captures::of(&captured::tests::probe()),
        ..Label::default()
    };
    let only_rdi = Some(v1::Registers {
        rdi: Some(1),
        ..Default::default()
    });
    let mut event = returned(9_u64.wrapping_neg());
    event.registers = only_rdi;
    event.call.as_mut().unwrap().entry = only_rdi;
    event.captured = captured::tests::BYTES.to_vec().into();
    event.unreadable = 0b10;
    expect![[
        r#"{"type":"event","machine":"vm0","seq":41,"probe":1,"event":"r_vfs_read_0","symbol":"vfs_read","offset":0,"vcpu":0,"host_ns":1234567890123,"realtime_ns":null,"guest_tsc":"0x123456789","pid":123,"tgid":123,"comm":"dd","cost_ns":2100,"kind":"return","registers":{"rax":null,"rbx":null,"rcx":null,"rdx":null,"rsi":null,"rdi":"0x1","rsp":null,"rbp":null,"r8":null,"r9":null,"r10":null,"r11":null,"r12":null,"r13":null,"r14":null,"r15":null,"rip":"0x0","rflags":"0x0"},"fault":null,"call":{"id":7,"entry_ns":1234567877778,"entry_tsc":"0x123450000","duration_ns":12345,"value":"0xfffffffffffffff7","error":"EBADF","entry":{"rax":null,"rbx":null,"rcx":null,"rdx":null,"rsi":null,"rdi":"0x1","rsp":null,"rbp":null,"r8":null,"r9":null,"r10":null,"r11":null,"r12":null,"r13":null,"r14":null,"r15":null,"rip":"0x0","rflags":"0x0"}},"captured":[{"what":"-4(%di)","data":"0011aa"},{"what":"$stack2","data":null}],"stack":null,"stack_complete":null,"args":null}"#
    ]]
    .assert_eq(&written(&event, &label, None));
}

#[test]
fn values_have_their_types() {
    let text = v1::Item {
        what: Some(v1::item::What::Fetched(v1::FetchedItem {
            read: Some(v1::fetched_item::Read::Text(8)),
            ..Default::default()
        })),
    };
    let retval = Source::Field(v1::EventField::Retval.into());
    let pointer = plain("void *", 8, v1::TypeKind::Pointer);
    let string = plain("char[]", 0, v1::TypeKind::String);
    let probe = v1::Probe {
        actions: Some(v1::Actions {
            capture: vec![text],
            ..Default::default()
        }),
        arguments: vec![
            argument("z", in_registers(&[v1::Register::Rdi], true), pointer),
            argument("name", Source::Item(0), string),
            argument("gone", Source::Item(1), int()),
            argument("$retval", retval, int()),
        ],
        call: true,
        ..Default::default()
    };
    let label = Label {
        captures: Captures::of(&probe),
        arguments: Arguments::of(&probe),
        ..Label::default()
    };
    let event = v1::Event {
        captured: b"\x04\0/etc".to_vec().into(),
        ..returned(2_u64.wrapping_neg())
    };
    let line = written(&event, &label, None);
    let (_, rest) = line.split_once("\"captured\"").unwrap();
    expect![[r#":[],"stack":null,"stack_complete":null,"args":{"z":"0xffff888003123400","name":"/etc","gone":null,"$retval":-2}}"#]]
        .assert_eq(rest);
}

#[test]
fn fault_has_its_exception() {
    let label = Label {
        name: "a".into(),
        ..Label::default()
    };
    let event = v1::Event {
        kind: v1::EventKind::Fault.into(),
        fault: Some(v1::Fault {
            vector: 14,
            error_code: Some(2),
        }),
        ..Default::default()
    };
    expect![[
        r##"{"type":"event","machine":"vm0","seq":0,"probe":0,"event":"a","symbol":null,"offset":null,"vcpu":0,"host_ns":null,"realtime_ns":null,"guest_tsc":"0x0","pid":null,"tgid":null,"comm":null,"cost_ns":0,"kind":"fault","registers":{"rax":null,"rbx":null,"rcx":null,"rdx":null,"rsi":null,"rdi":null,"rsp":null,"rbp":null,"r8":null,"r9":null,"r10":null,"r11":null,"r12":null,"r13":null,"r14":null,"r15":null,"rip":"0x0","rflags":"0x0"},"fault":{"exception":"#PF","vector":14,"error_code":2},"call":null,"captured":[],"stack":null,"stack_complete":null,"args":null}"##
    ]]
    .assert_eq(&written(&event, &label, None));
}

#[test]
fn unknown_things_are_null() {
    let label = Label {
        name: "probe_1".into(),
        ..Label::default()
    };
    let event = v1::Event::default();
    expect![[
        r#"{"type":"event","machine":"vm0","seq":0,"probe":0,"event":"probe_1","symbol":null,"offset":null,"vcpu":0,"host_ns":null,"realtime_ns":null,"guest_tsc":"0x0","pid":null,"tgid":null,"comm":null,"cost_ns":0,"kind":"unknown","registers":{"rax":null,"rbx":null,"rcx":null,"rdx":null,"rsi":null,"rdi":null,"rsp":null,"rbp":null,"r8":null,"r9":null,"r10":null,"r11":null,"r12":null,"r13":null,"r14":null,"r15":null,"rip":"0x0","rflags":"0x0"},"fault":null,"call":null,"captured":[],"stack":null,"stack_complete":null,"args":null}"#
    ]]
    .assert_eq(&written(&event, &label, None));
}

#[test]
fn drops_and_ends_are_lines_of_their_own() {
    let dropped = Line::Dropped {
        machine: "vm0",
        count: 3,
    };
    check(
        &dropped,
        expect![[r#"{"type":"dropped","machine":"vm0","count":3}"#]],
    );
    let ending = v1::Ending {
        reason: v1::EndReason::Shutdown.into(),
        guest_status: Some(7),
        report: String::new(),
    };
    let ended = Line::Ended {
        machine: "vm0",
        ending: Shown(&ending),
    };
    check(
        &ended,
        expect![[
            r#"{"type":"ended","machine":"vm0","reason":"shutdown","guest_status":7,"report":null}"#
        ]],
    );
}

#[test]
fn arguments_of_a_probe_have_names_and_types() {
    let probe = v1::Probe {
        arguments: vec![argument("dfd", in_registers(&[], false), int())],
        ..Default::default()
    };
    let line = serde_json::to_string(&Shown(&probe)).unwrap();
    let end =
        r#","actions":[],"arguments":[{"name":"dfd","type":"int"}],"owner":null,"session":null}"#;
    assert!(line.ends_with(end), "{line}");
}
