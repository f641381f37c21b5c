//! Self-check: finds out what this host's KVM does by running tiny guests, not by asking for its name.
//!
//! Hosts differ in how a planted int3 reaches user space, in which debug facilities work and in whether the guest's
//! user space works at all. Every answer here was observed in a micro-guest; none is taken from a feature flag
//! alone. Every check ends within a time limit, even if the guest hangs.

use super::guests::{self, OutRip};
use super::kvm::{API_VERSION, SelfCheckError, open_kvm};
use super::window;
use crate::catch_mode::CatchMode;

/// Rating of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Works as it should.
    Good,
    /// Something works less well, or in a roundabout way.
    Limited,
    /// Guests or probes cannot work.
    Bad,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Subject of the check.
    pub what: &'static str,
    /// The observed behaviour.
    pub result: String,
    /// Rating of the behaviour.
    pub verdict: Verdict,
    /// Consequence for the user.
    pub meaning: &'static str,
}

/// Result of all checks of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReport {
    /// Findings, the most interesting ones first.
    pub items: Vec<Finding>,
    /// How planted int3s are caught; `None` if they are not caught.
    pub catch_mode: Option<CatchMode>,
    /// Whether a fault in a displaced instruction can be delivered as a fault of the original.
    pub exception_window: bool,
    /// Whether hardware breakpoints fire.
    pub hw_breakpoints: bool,
    /// RIP at the exit of an `out`; `None` if an `out` does not exit.
    pub out_rip: Option<OutRip>,
    /// Whether Linux guests can run, user space included.
    pub can_run_linux: bool,
}

/// Checks this host. Takes a fraction of a second.
///
/// # Errors
/// When KVM cannot be used at all, or a micro-guest cannot be created.
pub fn check() -> Result<HostReport, SelfCheckError> {
    let kvm = open_kvm()?;
    let mut items = vec![Finding {
        what: "KVM",
        result: format!(
            "API version {API_VERSION}, up to {} vCPUs per guest",
            kvm.get_max_vcpus()
        ),
        verdict: Verdict::Good,
        meaning: "virtual machines can be created",
    }];

    let syscall = guests::syscall()?;
    items.push(match &syscall {
        Ok(()) => Finding {
            what: "SYSCALL from user mode",
            result: "enters the kernel".to_owned(),
            verdict: Verdict::Good,
            meaning: "Linux guests run",
        },
        Err(seen) => Finding {
            what: "SYSCALL from user mode",
            result: format!("broken: {seen}"),
            verdict: Verdict::Bad,
            meaning: "Linux guests cannot run here: their user space dies at its first system call",
        },
    });

    let caught = guests::int3()?;
    let catch_mode = caught.as_ref().ok().copied();
    items.push(match &caught {
        Ok(mode) => Finding {
            what: "int3 in the guest's kernel",
            result: mode.to_string(),
            verdict: match mode {
                CatchMode::DebugExit => Verdict::Good,
                CatchMode::EmulationExit | CatchMode::IdtGate => Verdict::Limited,
            },
            meaning: match mode {
                CatchMode::DebugExit => "probes are caught by KVM itself",
                CatchMode::EmulationExit => {
                    "probes are caught when KVM fails to emulate them; slow"
                }
                CatchMode::IdtGate => {
                    "KVM lets int3 through: probes are caught at the guest's own breakpoint entry"
                }
            },
        },
        Err(seen) => Finding {
            what: "int3 in the guest's kernel",
            result: format!("not caught: {seen}"),
            verdict: Verdict::Bad,
            meaning: "probes cannot be planted",
        },
    });

    let not_caught = || Ok(Err("not looked at, as int3 is not caught".to_owned()));
    let window = catch_mode.map_or_else(not_caught, window::exceptions)?;
    items.push(switch(
        "exceptions of displaced instructions",
        &window,
        "a fault of a displaced instruction is one of the original to the guest",
        "only probes on instructions that cannot fault are safe",
    ));
    let shadow = catch_mode.map_or_else(not_caught, window::interrupt_shadow)?;
    items.push(switch(
        "interrupts held off after sti",
        &shadow,
        "probes on sti are exact",
        "a probe on sti may let an interrupt in one instruction early",
    ));
    let hw_breakpoints = guests::hw_breakpoint()?;
    items.push(switch(
        "hardware breakpoints",
        &hw_breakpoints,
        "up to four per guest can be used besides int3",
        "not needed by probes; watchpoints will not work",
    ));

    let out = guests::out()?;
    let out_rip = out.as_ref().ok().copied();
    items.push(match &out {
        Ok(rip) => Finding {
            what: "port output",
            result: match rip {
                OutRip::AtInstruction => "exits with RIP at the instruction".to_owned(),
                OutRip::AfterInstruction => "exits with RIP after the instruction".to_owned(),
            },
            verdict: Verdict::Good,
            meaning: "devices work, and so does the gate for int3s that KVM lets through",
        },
        Err(seen) => Finding {
            what: "port output",
            result: format!("does not exit: {seen}"),
            verdict: Verdict::Bad,
            meaning: "no device works",
        },
    });

    Ok(HostReport {
        items,
        catch_mode,
        exception_window: window.is_ok(),
        hw_breakpoints: hw_breakpoints.is_ok(),
        out_rip,
        can_run_linux: syscall.is_ok() && out.is_ok(),
    })
}

/// Returns how this host catches int3s, without the other checks; `None` if they are not caught.
///
/// # Errors
/// As [`check`].
pub fn catch_mode() -> Result<Option<CatchMode>, SelfCheckError> {
    open_kvm()?;
    Ok(guests::int3()?.ok())
}

/// Returns a finding for `seen`: "works", rated as good, or the observed behaviour, rated as limited. `good` and
/// `limited` are the consequences for the user.
fn switch(
    what: &'static str,
    seen: &Result<(), String>,
    good: &'static str,
    limited: &'static str,
) -> Finding {
    match seen {
        Ok(()) => Finding {
            what,
            result: "works".to_owned(),
            verdict: Verdict::Good,
            meaning: good,
        },
        Err(seen) => Finding {
            what,
            result: format!("does not work: {seen}"),
            verdict: Verdict::Limited,
            meaning: limited,
        },
    }
}

#[cfg(test)]
mod tests;
