//! From the terms of the engine and the machine to those of the wire.

use hvprobe_arch::Regs;
use hvprobe_introspect::event::Event;
use hvprobe_introspect::probe::{Mechanism, ProbeInfo, ProbeState};
use hvprobe_introspect::symbols::{Symbol, SymbolKind};
use hvprobe_introspect::task::Task;
use hvprobe_proto::v1;

use crate::CatchMode;
use crate::machine::{EndReason, Ending, Machine, State};
use crate::selfcheck::{Finding, Verdict};

pub(super) fn machine(machine: &Machine) -> v1::Machine {
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
    }
}

pub(super) fn catch_mode(mode: CatchMode) -> v1::CatchMode {
    match mode {
        CatchMode::DebugExit => v1::CatchMode::DebugExit,
        CatchMode::EmulationExit => v1::CatchMode::EmulationExit,
        CatchMode::IdtGate => v1::CatchMode::IdtGate,
    }
}

pub(super) fn ending(ending: &Ending) -> v1::Ending {
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

pub(super) fn probes(machine: &Machine) -> Vec<v1::Probe> {
    machine.probes().into_iter().map(probe).collect()
}

fn probe(info: ProbeInfo) -> v1::Probe {
    let (state, refusal) = match info.state {
        ProbeState::Pending => (v1::ProbeState::Pending, String::new()),
        ProbeState::Placed => (v1::ProbeState::Placed, String::new()),
        ProbeState::Refused(why) => (v1::ProbeState::Refused, why),
        ProbeState::Gone => (v1::ProbeState::Gone, String::new()),
    };
    let mechanism = match info.mechanism {
        None => v1::Mechanism::Unspecified,
        Some(Mechanism::Emulated | Mechanism::Boosted) => v1::Mechanism::Emulated,
        Some(Mechanism::Stepped) => v1::Mechanism::Stepped,
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
        mechanism: mechanism.into(),
        hits: info.counts.hits,
        missed: info.counts.missed,
        faults: info.counts.faults,
    }
}

pub(super) fn event(event: &Event) -> v1::Event {
    v1::Event {
        seq: event.seq,
        probe: event.probe.0,
        vcpu: event.vcpu,
        host_ns: event.host_ns,
        guest_tsc: event.guest_tsc,
        registers: Some(registers(&event.regs)),
        task: event.task.as_ref().map(task),
        cost_ns: event.cost_ns,
    }
}

fn registers(regs: &Regs) -> v1::Registers {
    v1::Registers {
        rax: regs.rax,
        rbx: regs.rbx,
        rcx: regs.rcx,
        rdx: regs.rdx,
        rsi: regs.rsi,
        rdi: regs.rdi,
        rsp: regs.rsp,
        rbp: regs.rbp,
        r8: regs.r8,
        r9: regs.r9,
        r10: regs.r10,
        r11: regs.r11,
        r12: regs.r12,
        r13: regs.r13,
        r14: regs.r14,
        r15: regs.r15,
        rip: regs.rip,
        rflags: regs.rflags,
    }
}

fn task(task: &Task) -> v1::Task {
    let comm = task.comm.split(|&byte| byte == 0).next();
    v1::Task {
        pid: task.pid,
        tgid: task.tgid,
        comm: comm.unwrap_or_default().to_vec(),
    }
}

/// `forbidden` is the reason why no probe can be planted at it.
pub(super) fn symbol(symbol: &Symbol<'_>, forbidden: Option<String>) -> v1::Symbol {
    let kind = match symbol.kind {
        SymbolKind::Text => v1::SymbolKind::Text,
        SymbolKind::Data => v1::SymbolKind::Data,
        SymbolKind::Absolute => v1::SymbolKind::Absolute,
    };
    v1::Symbol {
        name: symbol.name.to_owned(),
        address: symbol.addr.0,
        size: symbol.size,
        kind: kind.into(),
        forbidden: forbidden.unwrap_or_default(),
    }
}

pub(super) fn finding(finding: Finding) -> v1::Finding {
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
    use hvprobe_introspect::probe::ProbeId;

    use super::*;

    #[test]
    fn command_name_ends_at_its_first_zero_and_needs_none() {
        let mut of_guest = Task {
            pid: 5,
            tgid: 4,
            comm: *b"dd\0rubbish\0\0\0\0\0\0",
        };
        assert_eq!(task(&of_guest).comm, b"dd");
        of_guest.comm = [b'x'; 16];
        assert_eq!(task(&of_guest).comm, [b'x'; 16]);
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
        let sent = event(&Event {
            seq: 1,
            probe: ProbeId(2),
            vcpu: 3,
            host_ns: 4,
            guest_tsc: 5,
            regs,
            task: None,
            cost_ns: 6,
        });
        assert_eq!(sent.registers, Some(registers(&regs)));
        let got = sent.registers.unwrap();
        assert_eq!((got.rdi, got.rsi, got.rip, got.rflags), (6, 5, 17, 18));
        assert_eq!((sent.seq, sent.probe, sent.vcpu), (1, 2, 3));
        assert_eq!((sent.host_ns, sent.guest_tsc, sent.cost_ns), (4, 5, 6));
    }
}
