//! Configuration, state and end of a machine.

use std::fmt;
use std::path::PathBuf;

use hvprobe_engine::{PROBES_MAX, Refusals};
use hvprobe_spec::{ProbeId, ProbeSpec};
use hvprobe_vm::CatchMode;

/// Kernel command line of a machine whose configuration has none. The console is on the serial port. The kernel
/// does not search for a PCI bus, as there is none. A reboot or a panic ends the machine.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 quiet reboot=k panic=-1 pci=off";

/// Configuration of a machine to boot.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Name of the machine, for users.
    pub name: String,
    /// Kernel image: `bzImage` or ELF `vmlinux`.
    pub kernel: PathBuf,
    /// Initial RAM file system, if the guest has one.
    pub initrd: Option<PathBuf>,
    /// The whole kernel command line; [`DEFAULT_CMDLINE`] when empty.
    pub cmdline: String,
    /// Number of vCPUs.
    pub cpus: u32,
    /// RAM in bytes.
    pub memory: u64,
    /// Command for the guest, passed as `/hvprobe/command`; none when empty.
    pub command: Vec<String>,
    /// Probes to plant as soon as the kernel's text is final.
    pub probes: Vec<ProbeSpec>,
    /// Whether a probe that is refused before the boot fails the boot or is left out.
    pub refusals: Refusals,
    /// Whether to start paused: the guest does not run before [`Machine::resume`](crate::Machine::resume).
    pub paused: bool,
    /// Whether to use jumps instead of breakpoints for probes that need no exit.
    /// [`Machine::set_optimization`](crate::Machine::set_optimization) changes it later.
    pub optimize: bool,
    /// Limits on host resources.
    pub bounds: Bounds,
}

/// Limits on the host resources of one machine, besides its guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum number of registered probes; at most [`PROBES_MAX`].
    pub probes: usize,
    /// Maximum number of bytes of console output to keep; the newest are kept.
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

/// State of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The kernel's text is not final yet; probes are pending.
    Booting,
    /// Probes can be planted and fire.
    Running,
    /// All vCPUs are stopped until they are resumed.
    Paused,
    /// The machine has ended.
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

/// Status of a machine at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// State of the machine.
    pub state: State,
    /// How this host catches int3s.
    pub catch_mode: CatchMode,
    /// The hit that paused the machine, if one did: its probe and vCPU.
    pub stopped_at: Option<(ProbeId, usize)>,
    /// Whether the guest has replaced the kernel it was booted with by another (kexec, or a crash kernel). Then all
    /// probes are gone, and no probe can be planted any more.
    pub kernel_replaced: bool,
}

/// End of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Cause of the end.
    pub reason: EndReason,
    /// Exit status that the guest reported, if it did.
    pub guest_status: Option<u8>,
}

/// Cause of a machine's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The guest powered off.
    Shutdown,
    /// The guest rebooted.
    Reset,
    /// A client or the server stopped it.
    Stopped,
    /// The guest triple-faulted. Contains a report with registers and code.
    TripleFault(String),
    /// The guest could not continue. Contains a report, mostly with registers and code.
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
