//! Encodes events without making messages of them first.
//!
//! Invariant: the bytes are the same as prost's for [`convert::event`] of the same event: fields in the order
//! of their numbers, defaults left out (protobuf's encoding guide, "Message Structure"). A test compares the
//! two.

use hvprobe_arch::Regs;
use hvprobe_arch::regs::Gpr;
use hvprobe_hit::event::{Call, Event, EventKind};
use hvprobe_linux::task::Task;
use hvprobe_proto::v1;
use hvprobe_spec::RegisterSet;

use super::convert;

/// Maximum bytes of an event, with both its sets of registers and all that it can capture.
pub(crate) const EVENT_MAX: usize = 1024;

/// Wire types of fields (encoding guide, "Message Structure").
const VARINT: u32 = 0;
const FIXED64: u32 = 1;
const BYTES: u32 = 2;

/// `SubscribeResponse.events`.
const EVENTS: u32 = 3;

/// The registers in the order of their field numbers, which begin at 1; RIP and RFLAGS follow.
const FIELDS: [Gpr; 16] = {
    use Gpr::{R8, R9, R10, R11, R12, R13, R14, R15, Rax, Rbp, Rbx, Rcx, Rdi, Rdx, Rsi, Rsp};
    [
        Rax, Rbx, Rcx, Rdx, Rsi, Rdi, Rsp, Rbp, R8, R9, R10, R11, R12, R13, R14, R15,
    ]
};

/// Appends `event` as one of a `SubscribeResponse`'s events. Allocates nothing if `into` has room for
/// [`EVENT_MAX`] more bytes.
pub(crate) fn event(event: &Event, into: &mut Vec<u8>) {
    message(into, EVENTS, |into| fields(event, into));
}

fn fields(event: &Event, into: &mut Vec<u8>) {
    uint(into, 1, event.seq);
    uint(into, 2, event.probe.0.into());
    uint(into, 3, event.vcpu.into());
    fixed64(into, 4, event.host_ns);
    fixed64(into, 5, event.guest_tsc);
    message(into, 6, |into| registers(&event.regs, event.shown, into));
    if let Some(of) = &event.task {
        message(into, 7, |into| task(of, into));
    }
    uint(into, 8, event.cost_ns);
    let (kind, fault, of_call) = match &event.kind {
        EventKind::Hit => (v1::EventKind::Hit, None, None),
        EventKind::Post => (v1::EventKind::Post, None, None),
        EventKind::Fault { vector, error_code } => {
            (v1::EventKind::Fault, Some((*vector, *error_code)), None)
        }
        EventKind::Return(call) => (v1::EventKind::Return, None, Some(call)),
    };
    int(into, 9, i32::from(kind));
    if let Some((vector, error_code)) = fault {
        message(into, 10, |into| {
            uint(into, 1, vector.into());
            if let Some(code) = error_code {
                key(into, 2, VARINT);
                varint(into, code.into());
            }
        });
    }
    if let Some(of) = of_call {
        message(into, 11, |into| call(of, event, into));
    }
    bytes(into, 12, event.captured.bytes());
    uint(into, 13, event.captured.unreadable().into());
}

fn registers(regs: &Regs, shown: RegisterSet, into: &mut Vec<u8>) {
    for (field, register) in (1..).zip(FIELDS) {
        if shown.contains(register) {
            key(into, field, FIXED64);
            into.extend_from_slice(&regs.get(register).to_le_bytes());
        }
    }
    fixed64(into, 17, regs.rip);
    fixed64(into, 18, regs.rflags);
}

fn task(task: &Task, into: &mut Vec<u8>) {
    int(into, 1, task.pid);
    int(into, 2, task.tgid);
    bytes(into, 3, convert::comm(task));
}

fn call(call: &Call, event: &Event, into: &mut Vec<u8>) {
    uint(into, 1, call.id);
    fixed64(into, 2, call.entry_ns);
    fixed64(into, 3, call.entry_tsc);
    uint(into, 4, convert::duration_ns(call, event));
    fixed64(into, 5, event.regs.rax);
    message(into, 6, |into| registers(&call.entry, event.shown, into));
}

#[inline]
fn key(into: &mut Vec<u8>, field: u32, kind: u32) {
    varint(into, u64::from(field << 3 | kind));
}

#[inline]
fn varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    into.push(value.to_le_bytes()[0]);
}

#[inline]
fn uint(into: &mut Vec<u8>, field: u32, value: u64) {
    if value != 0 {
        key(into, field, VARINT);
        varint(into, value);
    }
}

/// Negative numbers are extended to 64 bits (encoding guide, "Signed Integers").
#[inline]
fn int(into: &mut Vec<u8>, field: u32, value: i32) {
    uint(into, field, i64::from(value).cast_unsigned());
}

#[inline]
fn fixed64(into: &mut Vec<u8>, field: u32, value: u64) {
    if value != 0 {
        key(into, field, FIXED64);
        into.extend_from_slice(&value.to_le_bytes());
    }
}

#[inline]
fn bytes(into: &mut Vec<u8>, field: u32, value: &[u8]) {
    if !value.is_empty() {
        key(into, field, BYTES);
        varint(into, value.len() as u64);
        into.extend_from_slice(value);
    }
}

/// Writes a nested message. Its length comes first, but is known last.
#[inline]
fn message(into: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    key(into, field, BYTES);
    let start = into.len();
    // Most messages are shorter than 2^7 or 2^14 bytes, so that their length takes one or two bytes.
    into.push(0);
    write(into);
    let len = into.len() - start - 1;
    let mut rest = len as u64;
    let mut at = start;
    while rest >= 0x80 {
        into[at] = rest.to_le_bytes()[0] | 0x80;
        rest >>= 7;
        at += 1;
        into.insert(at, 0);
    }
    into[at] = rest.to_le_bytes()[0];
}

#[cfg(test)]
mod tests {
    use hvprobe_hit::event::Captured;
    use hvprobe_spec::ProbeId;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    fn any_number() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), 1..0x4000_u64, any::<u64>(), Just(u64::MAX)]
    }

    fn any_regs() -> impl Strategy<Value = Regs> {
        proptest::collection::vec(any_number(), 18).prop_map(|values| {
            let mut regs = Regs::default();
            for (register, value) in FIELDS.into_iter().zip(&values) {
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
        let chosen = proptest::sample::subsequence(FIELDS.to_vec(), 0..=16);
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
            }
            let message = v1::SubscribeResponse {
                events: events.iter().map(convert::event).collect(),
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
}
