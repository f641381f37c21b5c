//! Converts types of the engine and the machine to those of the wire.

use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gva, Regs};
use hvprobe_engine::{ProbeInfo, ProbeState};
use hvprobe_hit::event::{Call, Event, EventKind};
use hvprobe_linux::symbols::{Symbol, SymbolKind};
use hvprobe_linux::task::Task;
use hvprobe_machine::host::{Fact, Finding, Verdict};
use hvprobe_machine::{CatchMode, EndReason, Ending, Machine, State, ThrottleNotice};
use hvprobe_proto::v1;
use hvprobe_proto::wire::{WireEnum as _, actions, arguments, budget, registers};
use hvprobe_spec::definition::Kind;
use hvprobe_spec::{Mechanism, RegisterSet};

use super::anchor;

pub(crate) fn machine(machine: &Machine) -> v1::Machine {
    let config = machine.config();
    let status = machine.status();
    let (state, ending) = match &status.state {
        State::Booting => (v1::MachineState::Booting, None),
        State::Running => (v1::MachineState::Running, None),
        State::Paused => (v1::MachineState::Paused, None),
        State::Stopped(ending) => (v1::MachineState::Stopped, Some(self::ending(ending))),
    };
    v1::Machine {
        name: config.name.clone(),
        state: state.into(),
        catch_mode: catch_mode(status.catch_mode).into(),
        kernel: config.kernel.display().to_string(),
        cpus: config.cpus,
        memory: config.memory,
        ending,
        first_entry_ns: machine.first_entry_ns(),
        stopped_at: status.stopped_at.map(|(probe, vcpu)| v1::StoppedAt {
            probe: probe.0,
            // There are far fewer than this can count.
            vcpu: u32::try_from(vcpu).unwrap_or(u32::MAX),
        }),
        disarmed: !machine.armed(),
        kernel_replaced: status.kernel_replaced,
        kernel_build_id: machine.image().build_id().map(<[u8]>::to_vec),
        skipped: Vec::new(),
        anchor: Some(anchor::now()),
        runs: machine.ioctls().iter().map(|ioctls| ioctls.run).sum(),
        // The machine's handle sets its identity.
        ..v1::Machine::default()
    }
}

pub(crate) fn catch_mode(mode: CatchMode) -> v1::CatchMode {
    match mode {
        CatchMode::DebugExit => v1::CatchMode::DebugExit,
        CatchMode::EmulationExit => v1::CatchMode::EmulationExit,
        CatchMode::IdtGate => v1::CatchMode::IdtGate,
    }
}

pub(crate) fn ending(ending: &Ending) -> v1::Ending {
    let (reason, report) = match &ending.reason {
        EndReason::Shutdown => (v1::EndReason::Shutdown, String::new()),
        EndReason::Reset => (v1::EndReason::Reset, String::new()),
        EndReason::Stopped => (v1::EndReason::Stopped, String::new()),
        EndReason::TripleFault(report) => (v1::EndReason::TripleFault, report.clone()),
        EndReason::Crash(report) => (v1::EndReason::Crash, report.clone()),
    };
    v1::Ending {
        reason: reason.into(),
        guest_status: ending.guest_status.map(u32::from),
        report,
    }
}

pub(crate) fn probes(machine: &Machine) -> Vec<v1::Probe> {
    let armed = machine.armed();
    machine
        .probes()
        .into_iter()
        .map(|info| probe(info, armed))
        .collect()
}

/// Converts a probe; `armed` is the global switch.
fn probe(info: ProbeInfo, armed: bool) -> v1::Probe {
    let (state, refusal) = match info.state {
        ProbeState::Pending => (v1::ProbeState::Pending, String::new()),
        ProbeState::Placed => (v1::ProbeState::Placed, String::new()),
        ProbeState::Refused(why) => (v1::ProbeState::Refused, why),
        ProbeState::Gone => (v1::ProbeState::Gone, String::new()),
    };
    let kind = match info.kind {
        Kind::Probe => v1::ProbeKind::Probe,
        Kind::Return { .. } => v1::ProbeKind::Return,
    };
    v1::Probe {
        id: info.id.0,
        name: info.name,
        definition: info.definition,
        address: info.addr.map(|at| at.0),
        symbol: info
            .symbol
            .map(|(name, offset)| v1::SymbolOffset { name, offset }),
        state: state.into(),
        refusal,
        disabled: info.disabled,
        mechanism: info.mechanism.map_or(0, Mechanism::number),
        unoptimized: info
            .unoptimized
            .map_or_else(String::new, |why| why.to_string()),
        hits: info.counts.hits,
        missed: info.counts.missed,
        faults: info.counts.faults,
        kind: kind.into(),
        maxactive: info.maxactive,
        vetoed: info.counts.vetoed,
        orphans: info.counts.orphans,
        errors: info.counts.errors,
        armed: armed && !info.disabled && state == v1::ProbeState::Placed,
        actions: Some(v1::Actions {
            registers: registers::set_to_wire(info.shown.registers),
            ..actions::to_wire(&info.actions)
        }),
        throttled: info.counts.throttled,
        turned_off: info.turned_off,
        budget: info.budget.as_ref().map(budget::to_wire),
        arguments: info
            .shown
            .arguments
            .iter()
            .map(arguments::to_wire)
            .collect(),
        call: info.shown.call,
        // The machine's handle sets the owner.
        ..v1::Probe::default()
    }
}

pub(crate) fn event(event: &Event) -> v1::Event {
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
                entry: Some(registers(&call.entry, event.shown)),
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
        registers: Some(registers(&event.regs, event.shown)),
        task: event.task.as_ref().map(task),
        cost_ns: event.cost_ns,
        kind: kind.into(),
        fault,
        call,
        captured: event.captured.bytes().to_vec().into(),
        unreadable: event.captured.unreadable(),
    }
}

/// Returns the duration of `call` in nanoseconds; `event` is its return.
pub(crate) fn duration_ns(call: &Call, event: &Event) -> u64 {
    // If one end is unknown, so is the duration.
    match call.entry_ns {
        0 => 0,
        entry => event.host_ns.saturating_sub(entry),
    }
}

fn registers(regs: &Regs, shown: RegisterSet) -> v1::Registers {
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

fn task(task: &Task) -> v1::Task {
    v1::Task {
        pid: task.pid,
        tgid: task.tgid,
        comm: comm(task).to_vec().into(),
    }
}

/// Returns the command name up to its first zero byte.
pub(crate) fn comm(task: &Task) -> &[u8] {
    let comm = task.comm.split(|&byte| byte == 0).next();
    comm.unwrap_or_default()
}

/// Converts a symbol. `forbidden` returns why no probe can be planted at an address of the kernel's text.
pub(crate) fn symbol<W: ToString>(
    symbol: &Symbol<'_>,
    forbidden: impl FnOnce(Gva) -> Option<W>,
) -> v1::Symbol {
    let (kind, forbidden) = match symbol.kind {
        SymbolKind::Text => (v1::SymbolKind::Text, forbidden(symbol.addr)),
        SymbolKind::Data => (v1::SymbolKind::Data, None),
        SymbolKind::Absolute => (v1::SymbolKind::Absolute, None),
    };
    v1::Symbol {
        name: symbol.name.to_owned(),
        address: symbol.addr.0,
        size: symbol.size,
        kind: kind.into(),
        forbidden: forbidden.map_or_else(String::new, |why| why.to_string()),
        module_build_id: None,
    }
}

/// Converts a notice of throttled hits.
pub(crate) fn throttled(notice: &ThrottleNotice) -> v1::Throttled {
    let ThrottleNotice { throttled, window } = notice;
    v1::Throttled {
        probe: throttled.probe.0,
        name: throttled.name.clone(),
        count: throttled.count,
        window_ns: u64::try_from(window.as_nanos()).unwrap_or(u64::MAX),
        disabled: throttled.disabled,
    }
}

pub(crate) fn fact(fact: Fact) -> v1::Fact {
    v1::Fact {
        of: fact.of.to_owned(),
        name: fact.name,
        value: fact.value,
    }
}

pub(crate) fn finding(finding: Finding) -> v1::Finding {
    let verdict = match finding.verdict {
        Verdict::Good => v1::Verdict::Good,
        Verdict::Limited => v1::Verdict::Limited,
        Verdict::Bad => v1::Verdict::Bad,
    };
    v1::Finding {
        what: finding.what.to_owned(),
        seen: finding.result,
        meaning: finding.meaning.to_owned(),
        verdict: verdict.into(),
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_hit::event::Captured;
    use hvprobe_spec::ProbeId;

    use super::*;

    #[test]
    fn command_name_ends_at_its_first_zero_and_needs_none() {
        let mut of_guest = Task {
            pid: 5,
            tgid: 4,
            comm: *b"dd\0rubbish\0\0\0\0\0\0",
        };
        assert_eq!(task(&of_guest).comm, b"dd"[..]);
        of_guest.comm = [b'x'; 16];
        assert_eq!(task(&of_guest).comm, [b'x'; 16][..]);
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
        let sent = event(&hit);
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
        let got = event(&hit).registers.unwrap();
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
        let sent = event(&Event {
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
        let sent = event(&Event {
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
}
