use hvprobe_hit::event::Captured;
use hvprobe_spec::ProbeId;
use proptest::prelude::*;

use super::*;

/// Makes a message of `event`, field by field.
fn message(event: &Event) -> v1::Event {
    let (kind, fault, call) = match &event.kind {
        EventKind::Hit => (v1::EventKind::Hit, None, None),
        EventKind::Post => (v1::EventKind::Post, None, None),
        EventKind::Fault { vector, error_code } => {
            let fault = v1::Fault {
                vector: (*vector).into(),
                error_code: *error_code,
            };
            (v1::EventKind::Fault, Some(fault), None)
        }
        EventKind::Return(call) => {
            let call = v1::Call {
                id: call.id,
                entry_ns: call.entry_ns,
                entry_tsc: call.entry_tsc,
                duration_ns: duration_ns(call, event),
                value: event.regs.rax,
                entry: Some(shown_registers(&call.entry, event.shown)),
            };
            (v1::EventKind::Return, None, Some(Box::new(call)))
        }
    };
    v1::Event {
        seq: event.seq,
        probe: event.probe.0,
        vcpu: event.vcpu,
        host_ns: event.host_ns,
        guest_tsc: event.guest_tsc,
        registers: Some(shown_registers(&event.regs, event.shown)),
        task: event.task.as_ref().map(of_task),
        cost_ns: event.cost_ns,
        kind: kind.into(),
        fault,
        call,
        captured: event.captured.bytes().to_vec().into(),
        unreadable: event.captured.unreadable(),
    }
}

fn shown_registers(regs: &Regs, shown: RegisterSet) -> v1::Registers {
    let show = |register| shown.contains(register).then(|| regs.get(register));
    v1::Registers {
        rax: show(Gpr::Rax),
        rbx: show(Gpr::Rbx),
        rcx: show(Gpr::Rcx),
        rdx: show(Gpr::Rdx),
        rsi: show(Gpr::Rsi),
        rdi: show(Gpr::Rdi),
        rsp: show(Gpr::Rsp),
        rbp: show(Gpr::Rbp),
        r8: show(Gpr::R8),
        r9: show(Gpr::R9),
        r10: show(Gpr::R10),
        r11: show(Gpr::R11),
        r12: show(Gpr::R12),
        r13: show(Gpr::R13),
        r14: show(Gpr::R14),
        r15: show(Gpr::R15),
        rip: regs.rip,
        rflags: regs.rflags,
    }
}

fn of_task(task: &Task) -> v1::Task {
    v1::Task {
        pid: task.pid,
        tgid: task.tgid,
        comm: comm(task).to_vec().into(),
    }
}

fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 1..0x4000_u64, any::<u64>(), Just(u64::MAX)]
}

fn any_regs() -> impl Strategy<Value = Regs> {
    proptest::collection::vec(any_number(), 18).prop_map(|values| {
        let mut regs = Regs::default();
        for (register, value) in Gpr::VALUES.iter().copied().zip(&values) {
            regs.set(register, *value);
        }
        (regs.rip, regs.rflags) = (values[16], values[17]);
        regs
    })
}

fn any_kind() -> impl Strategy<Value = EventKind> {
    let call = (any_number(), any_number(), any_number(), any_regs());
    prop_oneof![
        Just(EventKind::Hit),
        Just(EventKind::Post),
        (any::<u8>(), any::<Option<u32>>())
            .prop_map(|(vector, error_code)| EventKind::Fault { vector, error_code }),
        call.prop_map(|(id, entry_ns, entry_tsc, entry)| EventKind::Return(Call {
            id,
            entry_ns,
            entry_tsc,
            entry
        })),
    ]
}

fn any_task() -> impl Strategy<Value = Option<Task>> {
    proptest::option::of(
        (any::<i32>(), any::<i32>(), any::<[u8; 16]>(), 0..17_usize).prop_map(
            |(pid, tgid, mut comm, len)| {
                comm[len..].fill(0);
                Task { pid, tgid, comm }
            },
        ),
    )
}

fn any_shown() -> impl Strategy<Value = RegisterSet> {
    let chosen = proptest::sample::subsequence(Gpr::VALUES.to_vec(), 0..=16);
    prop_oneof![
        Just(RegisterSet::default()),
        chosen.prop_map(RegisterSet::from_iter),
    ]
}

fn any_captured() -> impl Strategy<Value = Captured> {
    let item = (proptest::collection::vec(any::<u8>(), 1..80), any::<bool>());
    proptest::collection::vec(item, 0..4).prop_map(|items| {
        let mut captured = Captured::nothing();
        for (data, readable) in items {
            captured.item(data.len(), |into| {
                into.copy_from_slice(&data);
                readable
            });
        }
        captured
    })
}

prop_compose! {
    fn any_event()(
        kind in any_kind(),
        (seq, host_ns, guest_tsc, cost_ns) in (any_number(), any_number(), any_number(), any_number()),
        (probe, vcpu) in any::<(u32, u32)>(),
        regs in any_regs(),
        shown in any_shown(),
        captured in any_captured(),
        task in any_task(),
    ) -> Event {
        Event {
            kind,
            seq,
            probe: ProbeId(probe),
            vcpu,
            host_ns,
            guest_tsc,
            regs,
            shown,
            captured,
            task,
            cost_ns,
        }
    }
}

proptest! {
    #[test]
    fn bytes_are_those_of_the_message(events in proptest::collection::vec(any_event(), 1..4)) {
        let mut written = Vec::new();
        for one in &events {
            let before = written.len();
            event(one, &mut written);
            prop_assert!(written.len() - before <= EVENT_MAX);
            prop_assert_eq!(decoded(one), message(one));
        }
        let message = v1::SubscribeResponse {
            events: events.iter().map(message).collect(),
            ..Default::default()
        };
        prop_assert_eq!(&written, &message.encode_to_vec());
        prop_assert_eq!(v1::SubscribeResponse::decode(&written[..]).unwrap(), message);
    }
}

#[test]
fn largest_event_is_within_its_bound() {
    let regs = Regs {
        rax: u64::MAX,
        rip: u64::MAX,
        rflags: u64::MAX,
        ..Regs::default()
    };
    let mut captured = Captured::nothing();
    for _ in 0..31 {
        captured.item(8, |_| false);
    }
    let largest = Event {
        kind: EventKind::Return(Call {
            id: u64::MAX,
            entry_ns: u64::MAX,
            entry_tsc: u64::MAX,
            entry: regs,
        }),
        seq: u64::MAX,
        probe: ProbeId(u32::MAX),
        vcpu: u32::MAX,
        host_ns: u64::MAX,
        guest_tsc: u64::MAX,
        regs,
        shown: RegisterSet::default(),
        captured,
        task: Some(Task {
            pid: -1,
            tgid: -1,
            comm: [b'x'; 16],
        }),
        cost_ns: u64::MAX,
    };
    let mut written = Vec::new();
    event(&largest, &mut written);
    assert!(written.len() <= EVENT_MAX, "{}", written.len());
}

#[test]
fn command_name_ends_at_its_first_zero_and_needs_none() {
    let mut of_guest = Task {
        pid: 5,
        tgid: 4,
        comm: *b"dd\0rubbish\0\0\0\0\0\0",
    };
    assert_eq!(comm(&of_guest), b"dd");
    of_guest.comm = [b'x'; 16];
    assert_eq!(comm(&of_guest), [b'x'; 16]);
}

#[test]
fn each_register_keeps_its_place() {
    let regs = Regs {
        rax: 1,
        rbx: 2,
        rcx: 3,
        rdx: 4,
        rsi: 5,
        rdi: 6,
        rsp: 7,
        rbp: 8,
        r8: 9,
        r9: 10,
        r10: 11,
        r11: 12,
        r12: 13,
        r13: 14,
        r14: 15,
        r15: 16,
        rip: 17,
        rflags: 18,
    };
    let mut hit = Event {
        kind: EventKind::Hit,
        seq: 1,
        probe: ProbeId(2),
        vcpu: 3,
        host_ns: 4,
        guest_tsc: 5,
        regs,
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: None,
        cost_ns: 6,
    };
    let sent = decoded(&hit);
    let got = sent.registers.unwrap();
    assert_eq!((got.rax, got.rbx, got.rcx), (Some(1), Some(2), Some(3)));
    assert_eq!((got.rdx, got.rsi, got.rdi), (Some(4), Some(5), Some(6)));
    assert_eq!((got.rsp, got.rbp, got.r8), (Some(7), Some(8), Some(9)));
    assert_eq!((got.r9, got.r10, got.r11), (Some(10), Some(11), Some(12)));
    assert_eq!((got.r12, got.r13, got.r14), (Some(13), Some(14), Some(15)));
    assert_eq!((got.r15, got.rip, got.rflags), (Some(16), 17, 18));
    assert_eq!((sent.seq, sent.probe, sent.vcpu), (1, 2, 3));
    assert_eq!((sent.host_ns, sent.guest_tsc, sent.cost_ns), (4, 5, 6));

    hit.shown = [Gpr::Rdi].into_iter().collect();
    let got = decoded(&hit).registers.unwrap();
    assert_eq!((got.rdi, got.rip, got.rflags), (Some(6), 17, 18));
    assert_eq!((got.rax, got.rsi, got.r15), (None, None, None));
}

#[test]
fn captured_items_follow_each_other_and_those_unreadable_are_marked() {
    let mut captured = Captured::nothing();
    captured.item(3, |into| {
        into.copy_from_slice(&[1, 2, 3]);
        true
    });
    captured.item(8, |_| false);
    let sent = decoded(&Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: ProbeId(1),
        vcpu: 0,
        host_ns: 0,
        guest_tsc: 0,
        regs: Regs::default(),
        shown: RegisterSet::default(),
        captured,
        task: None,
        cost_ns: 0,
    });
    assert_eq!(sent.captured, [1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0][..]);
    assert_eq!(sent.unreadable, 0b10);
}

#[test]
fn return_has_value_duration_and_entry() {
    let call = Call {
        id: 9,
        entry_ns: 100,
        entry_tsc: 7,
        entry: Regs {
            rdi: 0x10,
            ..Regs::default()
        },
    };
    let sent = decoded(&Event {
        kind: EventKind::Return(call),
        seq: 0,
        probe: ProbeId(1),
        vcpu: 0,
        host_ns: 350,
        guest_tsc: 0,
        regs: Regs {
            rax: 42,
            ..Regs::default()
        },
        shown: [Gpr::Rdi].into_iter().collect(),
        captured: Captured::nothing(),
        task: None,
        cost_ns: 0,
    });
    assert_eq!(sent.kind(), v1::EventKind::Return);
    let call = sent.call.unwrap();
    assert_eq!((call.id, call.entry_ns, call.entry_tsc), (9, 100, 7));
    assert_eq!((call.duration_ns, call.value), (250, 42));
    assert_eq!(call.entry.unwrap().rdi, Some(0x10));
}
