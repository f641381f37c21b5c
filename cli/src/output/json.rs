//! Results as JSON, one object per line.
//!
//! Addresses, registers and the guest's time-stamp counter are strings of hexadecimal digits with the prefix
//! `0x`, because they need 64 bits and most JSON readers keep only 53. Counts, sizes and times are numbers.
//! Keys are always present; an unknown value is `null`.

use std::collections::BTreeMap;
use std::io;

use hvprobe_proto::v1;
use hvprobe_spec::errno;
use hvprobe_spec::language::text::hex;
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::events::captured::ItemData;
use super::events::registers::general;
use super::events::times::realtime;
use super::events::{Label, asked};
use super::printable::harmless;
use super::streams;
use super::summary::Row;
use super::values::names::Names;
use super::values::value_json::Json;
use super::words::Word as _;

/// 64-bit value that is written in hexadecimal.
#[derive(Clone, Copy, Debug)]
struct Hex(u64);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#x}", self.0))
    }
}

/// Prints `value` as one line on standard output and flushes it.
pub(crate) fn print(value: &impl Serialize) -> io::Result<()> {
    streams::print(&serde_json::to_string(value)?)
}

/// Line of a trace.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Line<'a> {
    /// A hit.
    Event(Hit<'a>),
    /// Loss of `count` events since the previous batch of events.
    Dropped { machine: &'a str, count: u64 },
    /// Hits beyond a probe's budget, which made no events.
    Throttled {
        machine: &'a str,
        #[serde(flatten)]
        notice: Shown<&'a v1::Throttled>,
    },
    /// A machine ended; it sends nothing more.
    Ended {
        machine: &'a str,
        #[serde(flatten)]
        ending: Shown<&'a v1::Ending>,
    },
    /// Totals of a probe.
    Summary(Row),
}

/// Wrapper for a value that is written as a JSON object.
#[derive(Debug)]
pub(crate) struct Shown<T>(pub(crate) T);

/// Writes the given members as an object, in the given order.
macro_rules! object {
    ($serializer:ident, { $($name:literal: $value:expr),+ $(,)? }) => {{
        let mut object = $serializer.serialize_map(None)?;
        $(object.serialize_entry($name, &$value)?;)+
        object.end()
    }};
}

pub(super) use object;

/// Implements `Serialize` for types, each as an object with the given members in the given order.
macro_rules! objects {
    ($($value:ident: $of:ty => $members:tt)+) => {$(
        impl Serialize for Shown<&$of> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let $value = self.0;
                object!(serializer, $members)
            }
        }
    )+};
}

objects! {
    argument: v1::Argument => {
        "name": harmless(argument.name.as_bytes()),
        "type": argument.r#type.as_ref().map(|ty| harmless(ty.name.as_bytes())),
    }

    call: v1::Call => {
        "id": call.id,
        "entry_ns": known_time(call.entry_ns),
        "entry_tsc": Hex(call.entry_tsc),
        "duration_ns": known_time(call.duration_ns),
        "value": Hex(call.value),
        "error": errno::returned(call.value),
        "entry": Registers(call.entry.unwrap_or_default()),
    }

    item: ItemData<'_> => {
        "what": item.what,
        // Hexadecimal digits, byte by byte; `null` if the item could not be read.
        "data": item.data.map(|data| hex(data.bytes())),
    }

    ending: v1::Ending => {
        "reason": ending.reason().or_unknown(),
        "guest_status": ending.guest_status,
        "report": some(&ending.report),
    }

    fault: v1::Fault => {
        "exception": super::events::exception(fault.vector),
        "vector": fault.vector,
        "error_code": fault.error_code,
    }

    finding: v1::Finding => {
        "what": finding.what,
        "seen": finding.seen,
        "verdict": finding.verdict().word().unwrap_or("?"),
        "meaning": finding.meaning,
    }

    gone: v1::MachineGone => {
        "name": harmless(gone.name.as_bytes()),
        "uid": gone.uid,
        "state": "gone",
    }

    machine: v1::Machine => {
        "name": machine.name,
        "uid": machine.uid,
        "labels": labels(machine),
        // Wall-clock time, since 1970.
        "created_ns": known_time(machine.create_ns).and_then(|ns| realtime(ns, machine.anchor.as_ref())),
        "ended_ns": machine.end_ns.and_then(|ns| realtime(ns, machine.anchor.as_ref())),
        "state": machine.state().or_unknown(),
        "catch_mode": machine.catch_mode().word(),
        "kernel": machine.kernel,
        "cpus": machine.cpus,
        "memory": machine.memory,
        "ending": machine.ending.as_ref().map(Shown),
        "stopped_at": machine.stopped_at.as_ref().map(Shown),
        "disarmed": machine.disarmed,
        "kernel_replaced": machine.kernel_replaced,
        "kernel_build_id": machine.kernel_build_id.as_deref().map(hex),
        "kernel_offset": machine.kernel_offset.map(Hex),
    }

    probe: v1::Probe => {
        "id": probe.id,
        "name": probe.name,
        "definition": probe.definition,
        "address": probe.address.map(Hex),
        "symbol": probe.symbol.as_ref().map(|at| &at.name),
        "offset": probe.symbol.as_ref().map(|at| at.offset),
        "state": probe.state().or_unknown(),
        "refusal": some(&probe.refusal),
        "disabled": probe.disabled,
        "mechanism": probe.mechanism().word(),
        "hits": probe.hits,
        "missed": probe.missed,
        "faults": probe.faults,
        "kind": probe.kind().word(),
        "armed": probe.armed,
        "maxactive": probe.maxactive,
        "vetoed": probe.vetoed,
        "orphans": probe.orphans,
        "errors": probe.errors,
        "throttled": probe.throttled,
        "turned_off": probe.turned_off,
        "budget": asked::budget(probe.budget.as_ref()),
        "actions": asked::of(probe),
        "arguments": probe.arguments.iter().map(Shown).collect::<Vec<_>>(),
        "owner": some(&probe.owner),
        "session": some(&probe.session),
    }

    at: v1::StoppedAt => {
        "probe": at.probe,
        "vcpu": at.vcpu,
    }

    symbol: v1::Symbol => {
        "name": symbol.name,
        "address": Hex(symbol.address),
        "size": symbol.size,
        "kind": symbol.kind().word(),
        "forbidden": some(&symbol.forbidden),
    }

    notice: v1::Throttled => {
        "probe": notice.probe,
        "event": notice.name,
        "count": notice.count,
        "window_ns": notice.window_ns,
        "disabled": notice.disabled,
    }
}

/// Returns the time, or `None` for zero, which means that it is unknown.
fn known_time(ns: u64) -> Option<u64> {
    (ns > 0).then_some(ns)
}

/// Returns the text, or `None` if it is empty.
fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// Returns the labels of a machine, sorted.
fn labels(machine: &v1::Machine) -> BTreeMap<String, String> {
    let labels = machine.labels.iter();
    labels
        .map(|(name, value)| (harmless(name.as_bytes()), harmless(value.as_bytes())))
        .collect()
}

/// Registers with their names.
#[derive(Debug)]
struct Registers(v1::Registers);

impl Serialize for Registers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(regs) = self;
        let general = general(regs).into_iter();
        let general = general.map(|(_, name, value)| (name, value.map(Hex)));
        let special = [("rip", Hex(regs.rip)), ("rflags", Hex(regs.rflags))];
        let special = special.map(|(name, value)| (name, Some(value)));
        serializer.collect_map(general.chain(special))
    }
}

/// A hit on a machine, with names for its addresses.
#[derive(Debug)]
pub(crate) struct Hit<'a> {
    pub(crate) machine: &'a str,
    pub(crate) event: &'a v1::Event,
    pub(crate) label: &'a Label,
    pub(crate) anchor: Option<&'a v1::Anchor>,
    pub(crate) names: &'a Names,
}

impl Serialize for Hit<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (event, label) = (self.event, self.label);
        let captured = label.captures.split(event);
        let args = label.arguments.values_of(event, &captured.items);
        let stack = captured.stack_trace();
        let others: Vec<_> = captured.others().collect();
        let symbol = label.symbol.as_ref();
        let task = event.task.as_ref();
        let host_ns = known_time(event.host_ns);
        object!(serializer, {
            "machine": self.machine,
            "seq": event.seq,
            "probe": event.probe,
            "event": label.name,
            "symbol": symbol.map(|(name, _)| name),
            "offset": symbol.map(|(_, offset)| offset),
            "vcpu": event.vcpu,
            "host_ns": host_ns,
            // The same time on the wall clock, since 1970.
            "realtime_ns": host_ns.and_then(|ns| realtime(ns, self.anchor)),
            "guest_tsc": Hex(event.guest_tsc),
            "pid": task.map(|task| task.pid),
            "tgid": task.map(|task| task.tgid),
            "comm": task.map(|task| harmless(&task.comm)),
            "cost_ns": event.cost_ns,
            "kind": event.kind().or_unknown(),
            "registers": Registers(event.registers.unwrap_or_default()),
            "fault": event.fault.as_ref().map(Shown),
            "call": event.call.as_deref().map(Shown),
            "captured": others.iter().map(Shown).collect::<Vec<_>>(),
            // The innermost address first, for probes that record the stack.
            "stack": stack.as_ref().map(|stack| stack.json(self.names)),
            // Whether the last address of the stack is the outermost.
            "stack_complete": stack.as_ref().map(|stack| !stack.goes_on),
            // Values of a hit or return, for probes that have values.
            "args": args.map(|args| Json::object(&args.values(), self.names)),
        })
    }
}

#[cfg(test)]
mod tests;
