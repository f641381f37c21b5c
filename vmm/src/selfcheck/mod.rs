//! What this host's KVM does, found out by running tiny guests, not by asking for its name.
//!
//! Hosts differ in how a planted int3 reaches us, in which debug facilities work and in whether user
//! space works at all. Every answer here was seen to happen in a [`MicroGuest`]; none is taken from
//! a feature flag alone. A check ends after a bounded time whatever the guest does.

mod facts;
mod guests;
mod window;

use std::fmt;

use kvm_ioctls::{Cap, Kvm};

use crate::microguest::MicroGuestError;

pub use facts::{Fact, facts};

/// How a planted int3 is caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CatchMode {
    /// `KVM_EXIT_DEBUG` with exception 3.
    DebugExit,
    /// `KVM_EXIT_INTERNAL_ERROR`: KVM emulates kernel code and leaves int3 to us.
    EmulationExit,
    /// KVM lets int3 through to the guest, where it is intercepted at the guest's own #BP entry.
    IdtGate,
}

impl fmt::Display for CatchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DebugExit => "debug-exit",
            Self::EmulationExit => "emulation-exit",
            Self::IdtGate => "idt-gate",
        })
    }
}

/// Where RIP is when a guest's `out` has exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutRip {
    /// At the `out`; KVM moves on at the next entry, unless RIP is changed.
    AtInstruction,
    /// After it already.
    AfterInstruction,
}

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Good,
    /// Something works less well, or in a roundabout way.
    Limited,
    /// Guests or probes cannot work.
    Bad,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub what: &'static str,
    /// What was seen.
    pub result: String,
    /// How good that is.
    pub verdict: Verdict,
    /// What it means for the user.
    pub meaning: &'static str,
}

/// What a host can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReport {
    /// Everything that was looked at, in the order of a reader's interest.
    pub items: Vec<Finding>,
    /// How planted int3s are caught; `None` where nothing catches them.
    pub catch_mode: Option<CatchMode>,
    /// A fault in a displaced instruction can be handed on as one of the original.
    pub exception_window: bool,
    /// Hardware breakpoints fire.
    pub hw_breakpoints: bool,
    /// Where RIP is at a port exit.
    pub out_rip: Option<OutRip>,
    /// Whether Linux guests can run, user space included.
    pub can_run_linux: bool,
}

/// Why the host could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum SelfCheckError {
    /// There is no KVM.
    #[error(
        "/dev/kvm does not exist: load the kvm_intel or kvm_amd module, enable virtualisation in the firmware, or give this machine nested virtualisation"
    )]
    Missing,
    /// There is, but not for this user.
    #[error(
        "no permission to use /dev/kvm: add your user to the group that owns it (usually kvm) and log in again"
    )]
    Forbidden,
    /// Opening it failed otherwise.
    #[error("cannot open /dev/kvm")]
    Open(#[source] std::io::Error),
    /// Not the KVM API there has been since 2007.
    #[error("/dev/kvm speaks API version {0}, not 12: this is no usable KVM")]
    Version(i32),
    /// A capability is missing without which nothing works.
    #[error("this host's KVM lacks {0}; a newer kernel is needed")]
    Capability(&'static str),
    /// A check could not be made.
    #[error("cannot check this host")]
    Guest(#[from] MicroGuestError),
}

/// Opens KVM, and says in one line what to do when that fails.
///
/// # Errors
/// When `/dev/kvm` is missing, forbidden, or no KVM that can be used.
pub fn open_kvm() -> Result<Kvm, SelfCheckError> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => SelfCheckError::Missing,
        libc::EACCES | libc::EPERM => SelfCheckError::Forbidden,
        _ => SelfCheckError::Open(error.into()),
    })?;
    match kvm.get_api_version() {
        API_VERSION => {}
        other => return Err(SelfCheckError::Version(other)),
    }
    for (capability, name) in NEEDED {
        if !kvm.check_extension(capability) {
            return Err(SelfCheckError::Capability(name));
        }
    }
    Ok(kvm)
}

/// KVM API, 4.1 `KVM_GET_API_VERSION`.
const API_VERSION: i32 = 12;

/// What the machine is built on.
const NEEDED: [(Cap, &str); 10] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::SyncRegs, "KVM_CAP_SYNC_REGS"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::SetGuestDebug, "KVM_CAP_SET_GUEST_DEBUG"),
];

/// Looks at this host. Takes a fraction of a second.
///
/// # Errors
/// When KVM cannot be used at all, or a micro-guest could not be made.
pub fn run() -> Result<HostReport, SelfCheckError> {
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

/// How this host catches int3s, without looking at anything else; `None` where nothing does.
///
/// # Errors
/// As [`run`].
pub fn catch_mode() -> Result<Option<CatchMode>, SelfCheckError> {
    open_kvm()?;
    Ok(guests::int3()?.ok())
}

/// A finding that is either "works" or what was seen instead, without being fatal.
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
