//! A breakpoint as gdb sets it: QEMU boots the guest, and its gdbstub reports every hit to a client.
//!
//! With KVM the stub plants an int3, which works only where KVM reports int3s to QEMU; elsewhere QEMU has to
//! emulate the guest. While a machine is stopped, its time stamp counter stands still, so the time is measured
//! outside the guest.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::gdb::Gdb;
use crate::guest::Console;

/// How QEMU runs the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    /// Chooses the accelerator by the JSON report of `hvprobe doctor`: KVM if the report says that KVM reports
    /// int3s, otherwise TCG.
    pub(crate) fn for_breakpoints(doctor: &str) -> Self {
        if doctor.contains("\"debug-exit\"") {
            Self::Kvm
        } else {
            Self::Tcg
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// Command line of the guest, like that of hvprobe's guest.
const CMDLINE: &str = "console=ttyS0 quiet reboot=k panic=-1 mitigations=off nokaslr";

/// Boots the guest in the folder `guest`, sets a breakpoint on `function` and lets the guest run into it `hits`
/// times. `patience` is the time limit for each answer of the guest's shell. Returns the times from each hit to
/// the next.
pub(crate) fn breakpoint(
    accelerator: Accelerator,
    guest: &Path,
    function: &str,
    call: &str,
    hits: u32,
    patience: Duration,
) -> Result<Vec<Duration>> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("gdb");
    let mut console = Console::open(&mut command(accelerator, guest, &socket), patience)?;
    console.type_line(&format!(
        "grep -w {function} /proc/kallsyms | sed 's/^/address: /'"
    ))?;
    let line = console.value("address")?;
    let address = line.split_whitespace().next().unwrap_or_default();
    let at = u64::from_str_radix(address, 16)
        .with_context(|| format!("{function} has no address in {line:?}"))?;
    let stream = UnixStream::connect(&socket).context("cannot connect to QEMU's gdbstub")?;
    Gdb::connect(stream)?.count(at, hits, || {
        console.type_line(&format!("workload calls {call} {hits}"))
    })
}

fn command(accelerator: Accelerator, guest: &Path, socket: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-M", "q35", "-accel", accelerator.name(), "-smp", "1"]);
    command.args(match accelerator {
        Accelerator::Kvm => ["-cpu", "host"],
        Accelerator::Tcg => ["-cpu", "max,-xsave"],
    });
    command.args(["-m", "256", "-append", CMDLINE]);
    command.args(["-nodefaults", "-no-user-config", "-nographic"]);
    command.args(["-serial", "stdio", "-no-reboot"]);
    // QEMU looks for its files relative to its own folder, which is a different one in a rig.
    command.env("QEMU_MODULE_DIR", "/usr/lib/x86_64-linux-gnu/qemu");
    command.args(["-L", "/usr/share/qemu", "-L", "/usr/share/seabios"]);
    command
        .arg("-chardev")
        .arg(format!(
            "socket,id=gdb,server=on,wait=off,path={}",
            socket.display()
        ))
        .args(["-gdb", "chardev:gdb"]);
    command
        .arg("-kernel")
        .arg(guest.join("kernel"))
        .arg("-initrd")
        .arg(guest.join("initrd.cpio"));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_is_for_hosts_that_report_int3s() {
        let line = r#"{"check":"int3","result":"ok","seen":"debug-exit"}"#;
        assert_eq!(Accelerator::for_breakpoints(line), Accelerator::Kvm);
        let line = r#"{"check":"int3","result":"limited","seen":"idt-gate"}"#;
        assert_eq!(Accelerator::for_breakpoints(line), Accelerator::Tcg);
    }
}
