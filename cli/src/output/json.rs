//! Results as JSON, one object per line.
//!
//! Addresses, registers and the guest's time-stamp counter are strings of hexadecimal digits with
//! `0x` in front, because they need 64 bits and most JSON readers keep 53; counts, sizes and times
//! are numbers. Keys are never left out: what is not known is `null`.

use std::io;

use hvprobe_proto::v1;
use serde::{Serialize, Serializer};

use super::events::Label;
use super::harmless;
use super::summary::Row;

/// A 64-bit value that is shown in hexadecimal.
#[derive(Clone, Copy, Debug)]
struct Hex(u64);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#x}", self.0))
    }
}

/// Prints `value` as one line on standard output, now.
pub(crate) fn print(value: &impl Serialize) -> io::Result<()> {
    super::print(&serde_json::to_string(value)?)
}

/// A line of a trace.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Line {
    /// A hit.
    Event(Box<Event>),
    /// Events are missing from here on.
    Dropped { machine: String, count: u64 },
    /// A machine has ended; nothing more comes from it.
    Ended {
        machine: String,
        #[serde(flatten)]
        ending: Ending,
    },
    /// What became of a probe.
    Summary(Summary),
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
    host_ns: u64,
    guest_tsc: Hex,
    pid: Option<i32>,
    tgid: Option<i32>,
    comm: Option<String>,
    cost_ns: u64,
    registers: Registers,
}

#[derive(Debug, Serialize)]
struct Registers {
    rax: Hex,
    rbx: Hex,
    rcx: Hex,
    rdx: Hex,
    rsi: Hex,
    rdi: Hex,
    rsp: Hex,
    rbp: Hex,
    r8: Hex,
    r9: Hex,
    r10: Hex,
    r11: Hex,
    r12: Hex,
    r13: Hex,
    r14: Hex,
    r15: Hex,
    rip: Hex,
    rflags: Hex,
}

impl From<v1::Registers> for Registers {
    fn from(regs: v1::Registers) -> Self {
        Self {
            rax: Hex(regs.rax),
            rbx: Hex(regs.rbx),
            rcx: Hex(regs.rcx),
            rdx: Hex(regs.rdx),
            rsi: Hex(regs.rsi),
            rdi: Hex(regs.rdi),
            rsp: Hex(regs.rsp),
            rbp: Hex(regs.rbp),
            r8: Hex(regs.r8),
            r9: Hex(regs.r9),
            r10: Hex(regs.r10),
            r11: Hex(regs.r11),
            r12: Hex(regs.r12),
            r13: Hex(regs.r13),
            r14: Hex(regs.r14),
            r15: Hex(regs.r15),
            rip: Hex(regs.rip),
            rflags: Hex(regs.rflags),
        }
    }
}

impl Line {
    /// A hit on `machine`.
    pub(crate) fn event(machine: &str, event: v1::Event, label: Label) -> Self {
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
            host_ns: event.host_ns,
            guest_tsc: Hex(event.guest_tsc),
            pid: task.map(|task| task.pid),
            tgid: task.map(|task| task.tgid),
            comm: task.map(|task| harmless(&task.comm)),
            cost_ns: event.cost_ns,
            registers: event.registers.unwrap_or_default().into(),
        }))
    }
}

/// How a guest ended.
#[derive(Debug, Serialize)]
pub(crate) struct Ending {
    reason: &'static str,
    guest_status: Option<u32>,
    report: Option<String>,
}

impl From<&v1::Ending> for Ending {
    fn from(ending: &v1::Ending) -> Self {
        Self {
            reason: super::table::reason(ending.reason()),
            guest_status: ending.guest_status,
            report: (!ending.report.is_empty()).then(|| ending.report.clone()),
        }
    }
}

/// What became of a probe.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    probe: Option<u32>,
    event: String,
    at: Option<String>,
    state: Option<String>,
    mechanism: Option<&'static str>,
    hits: Option<u64>,
    missed: Option<u64>,
    events: u64,
    cost_median_ns: Option<u64>,
    cost_p99_ns: Option<u64>,
}

impl From<&Row> for Summary {
    fn from(row: &Row) -> Self {
        Self {
            probe: Some(row.id),
            event: row.name.clone(),
            at: row.place.clone(),
            state: row.state.clone(),
            mechanism: row.mechanism,
            hits: row.hits,
            missed: row.missed,
            events: row.events,
            cost_median_ns: row.cost_ns.map(|(median, _)| median),
            cost_p99_ns: row.cost_ns.map(|(_, p99)| p99),
        }
    }
}

/// A machine of the list.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    name: String,
    state: &'static str,
    catch_mode: Option<&'static str>,
    kernel: String,
    cpus: u32,
    memory: u64,
    ending: Option<Ending>,
}

impl From<&v1::Machine> for Machine {
    fn from(machine: &v1::Machine) -> Self {
        Self {
            name: machine.name.clone(),
            state: super::table::machine_state(machine.state()),
            catch_mode: super::table::catch_mode(machine.catch_mode()),
            kernel: machine.kernel.clone(),
            cpus: machine.cpus,
            memory: machine.memory,
            ending: machine.ending.as_ref().map(Ending::from),
        }
    }
}

/// A probe of the list.
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
            state: super::table::probe_state(probe.state()),
            refusal: (!probe.refusal.is_empty()).then(|| probe.refusal.clone()),
            disabled: probe.disabled,
            mechanism: super::table::mechanism(probe.mechanism()),
            hits: probe.hits,
            missed: probe.missed,
            faults: probe.faults,
        }
    }
}

/// A symbol of the list.
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
            kind: super::table::symbol_kind(symbol.kind()),
            forbidden: (!symbol.forbidden.is_empty()).then(|| symbol.forbidden.clone()),
        }
    }
}

/// A line of the host report.
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
            verdict: super::table::verdict(finding.verdict()),
            meaning: finding.meaning.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;
    use crate::output::events::tests::hit;

    fn check(line: &Line, expected: Expect) {
        expected.assert_eq(&serde_json::to_string(line).unwrap());
    }

    #[test]
    fn hit_has_all_registers_in_hexadecimal() {
        let label = Label {
            name: "reads".into(),
            symbol: Some(("vfs_read".into(), 4)),
        };
        check(
            &Line::event("vm0", hit(), label),
            expect![[
                r#"{"type":"event","machine":"vm0","seq":41,"probe":1,"event":"reads","symbol":"vfs_read","offset":4,"vcpu":0,"host_ns":1234567890123,"guest_tsc":"0x123456789","pid":123,"tgid":123,"comm":"dd","cost_ns":2100,"registers":{"rax":"0x0","rbx":"0x0","rcx":"0x0","rdx":"0x1","rsi":"0x7fff12345000","rdi":"0xffff888003123400","rsp":"0x0","rbp":"0x0","r8":"0x0","r9":"0x0","r10":"0x0","r11":"0x0","r12":"0x0","r13":"0x0","r14":"0x0","r15":"0x0","rip":"0xffffffff81234560","rflags":"0x246"}}"#
            ]],
        );
    }

    #[test]
    fn unknown_things_are_null() {
        let label = Label {
            name: "probe_1".into(),
            symbol: None,
        };
        let event = v1::Event::default();
        check(
            &Line::event("vm0", event, label),
            expect![[
                r#"{"type":"event","machine":"vm0","seq":0,"probe":0,"event":"probe_1","symbol":null,"offset":null,"vcpu":0,"host_ns":0,"guest_tsc":"0x0","pid":null,"tgid":null,"comm":null,"cost_ns":0,"registers":{"rax":"0x0","rbx":"0x0","rcx":"0x0","rdx":"0x0","rsi":"0x0","rdi":"0x0","rsp":"0x0","rbp":"0x0","r8":"0x0","r9":"0x0","r10":"0x0","r11":"0x0","r12":"0x0","r13":"0x0","r14":"0x0","r15":"0x0","rip":"0x0","rflags":"0x0"}}"#
            ]],
        );
    }

    #[test]
    fn drops_and_ends_are_lines_of_their_own() {
        let dropped = Line::Dropped {
            machine: "vm0".into(),
            count: 3,
        };
        check(
            &dropped,
            expect![[r#"{"type":"dropped","machine":"vm0","count":3}"#]],
        );
        let ended = Line::Ended {
            machine: "vm0".into(),
            ending: Ending::from(&v1::Ending {
                reason: v1::EndReason::Shutdown.into(),
                guest_status: Some(7),
                report: String::new(),
            }),
        };
        check(
            &ended,
            expect![[
                r#"{"type":"ended","machine":"vm0","reason":"shutdown","guest_status":7,"report":null}"#
            ]],
        );
    }
}
