//! What a machine is asked to be, how it fares and how it ended.

use std::fmt;
use std::path::PathBuf;

use hvprobe_engine::{PROBES_MAX, Refusals};
use hvprobe_spec::{ProbeId, ProbeSpec};
use hvprobe_vm::CatchMode;

/// The kernel command line of a machine that is not given one: console on the serial port, no
/// search for a PCI bus, which is not there; reboot and panic end the machine.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 quiet reboot=k panic=-1 pci=off";

/// A machine to boot.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// What users call it.
    pub name: String,
    /// `bzImage` or ELF `vmlinux`.
    pub kernel: PathBuf,
    /// Initial RAM file system, if any.
    pub initrd: Option<PathBuf>,
    /// The whole kernel command line; [`DEFAULT_CMDLINE`] when empty.
    pub cmdline: String,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// RAM in bytes.
    pub memory: u64,
    /// A command for the guest, handed over as `/hvprobe/command`; none when empty.
    pub command: Vec<String>,
    /// Probes to plant as soon as the kernel's text is final.
    pub probes: Vec<ProbeSpec>,
    /// What becomes of them when one is refused before the boot.
    pub refusals: Refusals,
    /// Start paused: nothing runs before [`Machine::resume`](crate::Machine::resume).
    pub paused: bool,
    /// Use jumps instead of breakpoints where probes can do without exits;
    /// [`Machine::set_optimization`](crate::Machine::set_optimization) changes it.
    pub optimize: bool,
    /// What it may have.
    pub bounds: Bounds,
}

/// What one machine may have of the host, beside its guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Probes registered at a time; never more than [`PROBES_MAX`].
    pub probes: usize,
    /// Bytes of what it printed last on its console.
    pub console: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            probes: PROBES_MAX,
            console: 256 << 10,
        }
    }
}

/// What a machine is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The kernel's text is not final yet; probes are pending.
    Booting,
    /// Probes can be planted and fire.
    Running,
    /// All virtual CPUs are stopped until they are resumed.
    Paused,
    /// It has ended.
    Stopped(Ending),
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Booting => "booting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped(_) => "stopped",
        })
    }
}

/// A machine at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// What it is doing.
    pub state: State,
    /// How int3s are caught on this host.
    pub catch_mode: CatchMode,
    /// When a hit paused it: of which probe, on which virtual CPU.
    pub stopped_at: Option<(ProbeId, usize)>,
    /// The guest has left the kernel it was booted with for another (kexec, or a crash kernel): all
    /// probes are gone, and none can be planted any more.
    pub kernel_replaced: bool,
}

/// How a machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// What ended it.
    pub reason: EndReason,
    /// The exit status the guest reported, if it did.
    pub guest_status: Option<u8>,
}

/// What ended a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The guest powered off.
    Shutdown,
    /// The guest rebooted.
    Reset,
    /// It was told to stop.
    Stopped,
    /// The guest triple-faulted; with registers and code.
    TripleFault(String),
    /// The guest could not go on; with registers and code.
    Crash(String),
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shutdown => f.write_str("the guest powered off"),
            Self::Reset => f.write_str("the guest rebooted"),
            Self::Stopped => f.write_str("stopped"),
            Self::TripleFault(report) | Self::Crash(report) => f.write_str(report),
        }
    }
}
