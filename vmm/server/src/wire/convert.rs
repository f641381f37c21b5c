//! Converts types of the engine and the machine to those of the wire.

use hvprobe_arch::Gva;
use hvprobe_engine::{ProbeInfo, ProbeState};
use hvprobe_linux::modules::Module;
use hvprobe_linux::symbols::{Symbol, SymbolKind};
use hvprobe_machine::host::{Fact, Finding, Verdict};
use hvprobe_machine::{CatchMode, EndReason, Ending, Machine, State, ThrottleNotice};
use hvprobe_proto::v1;
use hvprobe_proto::wire::{Wire, WireEnum as _};
use hvprobe_spec::Mechanism;
use hvprobe_spec::definition::Kind;

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
            // There are far fewer vCPUs than a `u32` can count.
            vcpu: u32::try_from(vcpu).unwrap_or(u32::MAX),
        }),
        disarmed: !machine.armed(),
        kernel_replaced: status.kernel_replaced,
        kernel_build_id: machine.image().build_id().map(<[u8]>::to_vec),
        kernel_offset: machine.image().offset(),
        anchor: Some(anchor::now()),
        runs: machine.ioctls().iter().map(|ioctls| ioctls.run).sum(),
        // The machine's handle sets its identity; only the answer to `Boot` has the probes.
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
            registers: info.shown.registers.to_wire(),
            ..info.actions.to_wire()
        }),
        throttled: info.counts.throttled,
        turned_off: info.turned_off,
        budget: info.budget.as_ref().map(Wire::to_wire),
        arguments: info.shown.arguments.to_wire(),
        call: info.shown.call,
        // The machine's handle sets the owner.
        ..v1::Probe::default()
    }
}

/// Returns the symbol of `module` that contains `address`, as `MODULE:SYMBOL`, without the module's build id.
pub(crate) fn module_symbol(module: &Module, address: Gva) -> Option<v1::Symbol> {
    let (found, _) = module.symbols().containing(address)?;
    let mut converted = symbol(&found, |at| module.forbidden(at));
    converted.name = format!("{}:{}", module.name(), converted.name);
    Some(converted)
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
