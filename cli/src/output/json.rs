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
use serde::{Serialize, Serializer};

use super::events::registers::general;
use super::events::times::realtime;
use super::events::{Label, asked, captured};
use super::harmless;
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
    super::print(&serde_json::to_string(value)?)
}

/// Line of a trace.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Line {
    /// A hit.
    Event(Box<Event>),
    /// Events are missing from here on.
    Dropped { machine: String, count: u64 },
    /// Hits beyond a probe's budget, which made no events.
    Throttled {
        machine: String,
        probe: u32,
        event: String,
        count: u64,
        window_ns: u64,
        disabled: bool,
    },
    /// A machine ended; it sends nothing more.
    Ended {
        machine: String,
        #[serde(flatten)]
        ending: Ending,
    },
    /// Totals of a probe.
    Summary(Row),
}

/// A hit.
#[derive(Debug, Serialize)]
pub(crate) struct Event {
    machine: String,
    seq: u64,
    probe: u32,
    event: String,
    symbol: Option<String>,
    offset: Option<u64>,
    vcpu: u32,
    host_ns: Option<u64>,
    /// `host_ns` converted to the wall clock, since 1970.
    realtime_ns: Option<u64>,
    guest_tsc: Hex,
    pid: Option<i32>,
    tgid: Option<i32>,
    comm: Option<String>,
    cost_ns: u64,
    kind: &'static str,
    registers: Registers,
    fault: Option<Fault>,
    call: Option<Call>,
    captured: Vec<Captured>,
    /// Kernel stack, the innermost address first, for probes that record it.
    stack: Option<Json>,
    /// Whether the last address of the stack is the outermost.
    stack_complete: Option<bool>,
    /// Values of a hit or return, for probes that have values.
    args: Option<Json>,
}

/// Exception of the displaced instruction.
#[derive(Debug, Serialize)]
struct Fault {
    exception: String,
    vector: u32,
    error_code: Option<u32>,
}

/// Call that a return belongs to.
#[derive(Debug, Serialize)]
struct Call {
    id: u64,
    entry_ns: Option<u64>,
    entry_tsc: Hex,
    duration_ns: Option<u64>,
    value: Hex,
    error: Option<&'static str>,
    entry: Registers,
}

/// Returns the time, or `None` for zero, which means that it is unknown.
fn known_time(ns: u64) -> Option<u64> {
    (ns > 0).then_some(ns)
}

impl From<v1::Call> for Call {
    fn from(call: v1::Call) -> Self {
        Self {
            id: call.id,
            entry_ns: known_time(call.entry_ns),
            entry_tsc: Hex(call.entry_tsc),
            duration_ns: known_time(call.duration_ns),
            value: Hex(call.value),
            error: errno::returned(call.value),
            entry: Registers(call.entry.unwrap_or_default()),
        }
    }
}

/// Item that was read at a hit.
#[derive(Debug, Serialize)]
struct Captured {
    what: String,
    /// Hexadecimal digits, byte by byte; `null` if the item could not be read.
    data: Option<String>,
}

impl From<captured::Item<'_>> for Captured {
    fn from(item: captured::Item<'_>) -> Self {
        Self {
            data: item.data.map(|data| hex(data.bytes())),
            what: item.what.to_owned(),
        }
    }
}

/// Registers with their names.
#[derive(Debug)]
struct Registers(v1::Registers);

impl Serialize for Registers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(regs) = self;
        let special = [("rip", Some(regs.rip)), ("rflags", Some(regs.rflags))];
        let all = general(regs).into_iter().chain(special);
        serializer.collect_map(all.map(|(name, value)| (name, value.map(Hex))))
    }
}

impl Line {
    /// Makes a line from a report of throttled hits on `machine`.
    pub(crate) fn throttled(machine: &str, notice: &v1::Throttled) -> Self {
        Self::Throttled {
            machine: machine.to_owned(),
            probe: notice.probe,
            event: notice.name.clone(),
            count: notice.count,
            window_ns: notice.window_ns,
            disabled: notice.disabled,
        }
    }

    /// Makes a line from a hit on `machine`, with names for its addresses.
    pub(crate) fn event(
        machine: &str,
        event: v1::Event,
        label: Label,
        anchor: Option<&v1::Anchor>,
        names: &Names,
    ) -> Self {
        let captured = label.captures.split(&event);
        let args = label.arguments.values_of(&event, &captured.items);
        let args = args.map(|args| Json::object(&args.values(), names));
        let stack = captured.stack_trace();
        let captured = captured.others().map(Captured::from).collect();
        let (symbol, offset) = label.symbol.unzip();
        let task = event.task.as_ref();
        Self::Event(Box::new(Event {
            machine: machine.to_owned(),
            seq: event.seq,
            probe: event.probe,
            event: label.name,
            symbol,
            offset,
            vcpu: event.vcpu,
            host_ns: known_time(event.host_ns),
            realtime_ns: known_time(event.host_ns).and_then(|ns| realtime(ns, anchor)),
            guest_tsc: Hex(event.guest_tsc),
            pid: task.map(|task| task.pid),
            tgid: task.map(|task| task.tgid),
            comm: task.map(|task| harmless(&task.comm)),
            cost_ns: event.cost_ns,
            kind: event.kind().or_unknown(),
            registers: Registers(event.registers.unwrap_or_default()),
            fault: event.fault.map(|fault| Fault {
                exception: super::events::exception(fault.vector),
                vector: fault.vector,
                error_code: fault.error_code,
            }),
            call: event.call.map(|call| Call::from(*call)),
            captured,
            stack_complete: stack.as_ref().map(|stack| !stack.goes_on),
            stack: stack.map(|stack| stack.json(names)),
            args,
        }))
    }
}

/// End of a guest.
#[derive(Debug, Serialize)]
pub(crate) struct Ending {
    reason: &'static str,
    guest_status: Option<u32>,
    report: Option<String>,
}

impl From<&v1::Ending> for Ending {
    fn from(ending: &v1::Ending) -> Self {
        Self {
            reason: ending.reason().or_unknown(),
            guest_status: ending.guest_status,
            report: (!ending.report.is_empty()).then(|| ending.report.clone()),
        }
    }
}

/// Machine in the list.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    name: String,
    uid: String,
    labels: BTreeMap<String, String>,
    /// Wall-clock time, since 1970.
    created_ns: Option<u64>,
    ended_ns: Option<u64>,
    state: &'static str,
    catch_mode: Option<&'static str>,
    kernel: String,
    cpus: u32,
    memory: u64,
    ending: Option<Ending>,
    stopped_at: Option<StoppedAt>,
    disarmed: bool,
    kernel_replaced: bool,
    kernel_build_id: Option<String>,
}

/// Hit at which a machine is paused.
#[derive(Debug, Serialize)]
struct StoppedAt {
    probe: u32,
    vcpu: u32,
}

/// Machine that has left the list.
#[derive(Debug, Serialize)]
pub(crate) struct MachineGone {
    name: String,
    uid: String,
    state: &'static str,
}

impl From<&v1::MachineGone> for MachineGone {
    fn from(gone: &v1::MachineGone) -> Self {
        Self {
            name: harmless(gone.name.as_bytes()),
            uid: gone.uid.clone(),
            state: "gone",
        }
    }
}

impl From<&v1::Machine> for Machine {
    fn from(machine: &v1::Machine) -> Self {
        let anchor = machine.anchor.as_ref();
        let labels = machine.labels.iter();
        Self {
            name: machine.name.clone(),
            uid: machine.uid.clone(),
            labels: labels
                .map(|(name, value)| (harmless(name.as_bytes()), harmless(value.as_bytes())))
                .collect(),
            created_ns: known_time(machine.create_ns).and_then(|ns| realtime(ns, anchor)),
            ended_ns: machine.end_ns.and_then(|ns| realtime(ns, anchor)),
            state: machine.state().or_unknown(),
            catch_mode: machine.catch_mode().word(),
            kernel: machine.kernel.clone(),
            cpus: machine.cpus,
            memory: machine.memory,
            ending: machine.ending.as_ref().map(Ending::from),
            stopped_at: machine.stopped_at.map(|at| StoppedAt {
                probe: at.probe,
                vcpu: at.vcpu,
            }),
            disarmed: machine.disarmed,
            kernel_replaced: machine.kernel_replaced,
            kernel_build_id: machine.kernel_build_id.as_deref().map(hex),
        }
    }
}

/// Probe in the list.
#[derive(Debug, Serialize)]
pub(crate) struct Probe {
    id: u32,
    name: String,
    definition: String,
    address: Option<Hex>,
    symbol: Option<String>,
    offset: Option<u64>,
    state: &'static str,
    refusal: Option<String>,
    disabled: bool,
    mechanism: Option<&'static str>,
    hits: u64,
    missed: u64,
    faults: u64,
    kind: Option<&'static str>,
    armed: bool,
    maxactive: Option<u32>,
    vetoed: u64,
    orphans: u64,
    errors: u64,
    throttled: u64,
    turned_off: bool,
    budget: Vec<String>,
    actions: Vec<String>,
    arguments: Vec<Argument>,
    owner: Option<String>,
    session: Option<String>,
}

/// Value of each hit of a probe.
#[derive(Debug, Serialize)]
struct Argument {
    name: String,
    r#type: Option<String>,
}

impl From<&v1::Argument> for Argument {
    fn from(argument: &v1::Argument) -> Self {
        let ty = argument.r#type.as_ref();
        Self {
            name: harmless(argument.name.as_bytes()),
            r#type: ty.map(|ty| harmless(ty.name.as_bytes())),
        }
    }
}

impl From<&v1::Probe> for Probe {
    fn from(probe: &v1::Probe) -> Self {
        let symbol = probe.symbol.as_ref();
        Self {
            id: probe.id,
            name: probe.name.clone(),
            definition: probe.definition.clone(),
            address: probe.address.map(Hex),
            symbol: symbol.map(|at| at.name.clone()),
            offset: symbol.map(|at| at.offset),
            state: probe.state().or_unknown(),
            refusal: (!probe.refusal.is_empty()).then(|| probe.refusal.clone()),
            disabled: probe.disabled,
            mechanism: probe.mechanism().word(),
            hits: probe.hits,
            missed: probe.missed,
            faults: probe.faults,
            kind: probe.kind().word(),
            armed: probe.armed,
            maxactive: probe.maxactive,
            vetoed: probe.vetoed,
            orphans: probe.orphans,
            errors: probe.errors,
            throttled: probe.throttled,
            turned_off: probe.turned_off,
            budget: asked::budget(probe.budget.as_ref()),
            actions: asked::of(probe),
            arguments: probe.arguments.iter().map(Argument::from).collect(),
            owner: (!probe.owner.is_empty()).then(|| probe.owner.clone()),
            session: (!probe.session.is_empty()).then(|| probe.session.clone()),
        }
    }
}

/// Symbol in the list.
#[derive(Debug, Serialize)]
pub(crate) struct Symbol {
    name: String,
    address: Hex,
    size: u64,
    kind: Option<&'static str>,
    forbidden: Option<String>,
}

impl From<&v1::Symbol> for Symbol {
    fn from(symbol: &v1::Symbol) -> Self {
        Self {
            name: symbol.name.clone(),
            address: Hex(symbol.address),
            size: symbol.size,
            kind: symbol.kind().word(),
            forbidden: (!symbol.forbidden.is_empty()).then(|| symbol.forbidden.clone()),
        }
    }
}

/// Line of the host report.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    what: String,
    seen: String,
    verdict: &'static str,
    meaning: String,
}

impl From<&v1::Finding> for Finding {
    fn from(finding: &v1::Finding) -> Self {
        Self {
            what: finding.what.clone(),
            seen: finding.seen.clone(),
            verdict: finding.verdict().word().unwrap_or("?"),
            meaning: finding.meaning.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
