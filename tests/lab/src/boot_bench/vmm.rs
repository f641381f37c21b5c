//! The VMMs that are compared, and the command with which each boots the guest.

use std::fmt;
use std::path::PathBuf;
use std::process::Command;

/// The guest that every VMM boots, with one vCPU.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) kernel: PathBuf,
    /// The same kernel, unpacked.
    pub(crate) vmlinux: PathBuf,
    pub(crate) initrd: PathBuf,
    /// Memory in MiB.
    pub(crate) memory: u32,
}

/// A VMM, with a kernel image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vmm {
    /// hvprobe with the unpacked kernel.
    Hvprobe,
    /// hvprobe with the bzImage, which it unpacks itself.
    HvprobeBzImage,
    Microvm,
    Q35,
}

/// Kernel command line for all VMMs. Without a shell command in the initrd, `/init` waits at a shell.
const CMDLINE: &str = "console=ttyS0 reboot=t panic=-1 mitigations=off quiet";

impl Vmm {
    pub(crate) const ALL: [Self; 4] = [
        Self::Hvprobe,
        Self::HvprobeBzImage,
        Self::Microvm,
        Self::Q35,
    ];

    /// Returns the command that boots `guest` with its console on stdin and stdout.
    pub(crate) fn command(self, guest: &Guest) -> Command {
        let mut command = match self {
            Self::Hvprobe | Self::HvprobeBzImage => {
                let kernel = match self {
                    Self::Hvprobe => &guest.vmlinux,
                    _ => &guest.kernel,
                };
                let mut command = Command::new("hvprobe");
                command.args(["run", "--console", "--timings", "--cpus", "1"]);
                command
                    .arg("--memory")
                    .arg(format!("{}M", guest.memory))
                    .args(["--cmdline", CMDLINE])
                    .arg("--kernel")
                    .arg(kernel)
                    .arg("--initrd")
                    .arg(&guest.initrd);
                return command;
            }
            Self::Microvm => qemu("microvm"),
            Self::Q35 => qemu("q35"),
        };
        command
            .args(["-m", &guest.memory.to_string()])
            .args(["-append", CMDLINE])
            .arg("-kernel")
            .arg(&guest.kernel)
            .arg("-initrd")
            .arg(&guest.initrd);
        command
    }
}

fn qemu(machine: &str) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-M", machine, "-accel", "kvm", "-cpu", "host", "-smp", "1"]);
    command.args(["-nodefaults", "-no-user-config", "-nographic"]);
    command.args(["-serial", "stdio", "-no-reboot"]);
    // QEMU looks for its firmware relative to its own folder, which is a different one in a rig.
    command.args(["-L", "/usr/share/qemu", "-L", "/usr/share/seabios"]);
    command
}

impl fmt::Display for Vmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Hvprobe => "hvprobe",
            Self::HvprobeBzImage => "its bzImage",
            Self::Microvm => "qemu microvm",
            Self::Q35 => "qemu q35",
        })
    }
}
