//! Encodes events without making messages of them first.
//!
//! Invariant: the bytes are the same as prost's for a message of the same event: fields in the order of their
//! numbers, defaults left out (protobuf's encoding guide, "Message Structure"). A test compares the two.

use hvprobe_arch::Regs;
use hvprobe_arch::regs::Gpr;
use hvprobe_hit::event::{Call, Event, EventKind};
use hvprobe_linux::task::Task;
use hvprobe_proto::v1;
use hvprobe_proto::wire::WireEnum as _;
use hvprobe_spec::RegisterSet;
use prost::Message as _;

/// Maximum encoded length of an event, in bytes: with two full sets of registers and the longest capture.
pub(crate) const EVENT_MAX: usize = 1024;

/// Wire types of fields (encoding guide, "Message Structure").
const VARINT: u32 = 0;
const FIXED64: u32 = 1;
const BYTES: u32 = 2;

/// Number of the field `SubscribeResponse.events`.
const EVENTS: u32 = 3;

/// Appends `event` as one of a `SubscribeResponse`'s events. Allocates nothing if `into` has room for
/// [`EVENT_MAX`] more bytes.
pub(crate) fn event(event: &Event, into: &mut Vec<u8>) {
    message(into, EVENTS, |into| fields(event, into));
}

/// Returns `event` as a message, for the few events that are not sent in a batch.
pub(crate) fn decoded(event: &Event) -> v1::Event {
    let mut bytes = Vec::with_capacity(EVENT_MAX);
    fields(event, &mut bytes);
    v1::Event::decode(&bytes[..]).expect("what was encoded here can be decoded")
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
    int(into, 9, kind(&event.kind).into());
    match &event.kind {
        EventKind::Hit | EventKind::Post => {}
        EventKind::Fault { vector, error_code } => message(into, 10, |into| {
            uint(into, 1, (*vector).into());
            if let Some(code) = *error_code {
                key(into, 2, VARINT);
                varint(into, code.into());
            }
        }),
        EventKind::Return(of) => message(into, 11, |into| call(of, event, into)),
    }
    bytes(into, 12, event.captured.bytes());
    uint(into, 13, event.captured.unreadable().into());
}

/// Returns the duration of `call` in nanoseconds; `event` is its return.
fn duration_ns(call: &Call, event: &Event) -> u64 {
    // 0 stands for an unknown time of the entry. The duration is then unknown (0).
    match call.entry_ns {
        0 => 0,
        entry => event.host_ns.saturating_sub(entry),
    }
}

/// Converts the kind of an event.
pub(crate) fn kind(kind: &EventKind) -> v1::EventKind {
    match kind {
        EventKind::Hit => v1::EventKind::Hit,
        EventKind::Post => v1::EventKind::Post,
        EventKind::Fault { .. } => v1::EventKind::Fault,
        EventKind::Return(_) => v1::EventKind::Return,
    }
}

/// Returns the command name up to its first zero byte.
pub(crate) fn comm(task: &Task) -> &[u8] {
    let comm = task.comm.split(|&byte| byte == 0).next();
    comm.unwrap_or_default()
}

fn registers(regs: &Regs, shown: RegisterSet, into: &mut Vec<u8>) {
    // The fields are numbered from 1, in the order of the registers.
    for (field, register) in (1..).zip(Gpr::VALUES.iter().copied()) {
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
    bytes(into, 3, comm(task));
}

fn call(call: &Call, event: &Event, into: &mut Vec<u8>) {
    uint(into, 1, call.id);
    fixed64(into, 2, call.entry_ns);
    fixed64(into, 3, call.entry_tsc);
    uint(into, 4, duration_ns(call, event));
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
mod tests;
