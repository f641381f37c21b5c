//! QEMU's TCG with SVM: the quick rig. In it a guest's int3 is not intercepted, so hvprobe runs in its `idt-gate`
//! catch mode.
//!
//! Invariant: no guest runs on the first CPU of a machine with several. When a CPU loads its FPU, QEMU clears
//! IGNNE# in the `hflags2` of the first CPU (`cpu_clear_ignne` in target/i386), and takes no lock for that. If the
//! first CPU enters or leaves a guest at that moment, its own changes of `hflags2` are lost: whether interrupts are
//! held off, and whether addresses are those of a guest. Then a guest or the whole machine dies (docs/hosts.md). So
//! such a machine has one more CPU than asked for, and the first CPU does only work of the machine's kernel.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::Stdio;

use anyhow::{Context, Result};

use super::emulated::{CMDLINE, Emulator, MESSAGES, Plan};
use crate::kind::Kind;
use crate::process::{Apart, Group, Streams};
use crate::qemu::Qemu;

/// CPU model. XSAVE is off. The features that need it are off, too, because kernels since 7.0 would otherwise use
/// AVX, which does not work without XSAVE. `cx16` is off because QEMU before 8.0 leaves bits of RAX in the flags
/// after a `cmpxchg16b`, and an interrupt at that point makes them the kernel's flags (VM, DF, AC ...); kernels do
/// not use the instruction on a processor without it. `erms` is off because string instructions are emulated step
/// by step: without it, kernels copy and clear in steps of eight bytes, not one.
const PROCESSOR: &str = "max,+svm,-xsave,-avx,-avx2,-f16c,-fma,-vaes,-vpclmulqdq,-cx16,-erms,-fsrm";

/// Kernel option that keeps programs off the first CPU.
const SPARE: &str = "isolcpus=0";

pub(super) struct Tcg<'a>(pub(super) &'a Qemu);

impl Emulator for Tcg<'_> {
    fn kind(&self) -> Kind {
        Kind::Tcg
    }

    fn default_cpus(&self) -> u32 {
        2
    }

    fn default_memory(&self) -> u32 {
        3072
    }

    fn modules(&self) -> &'static [&'static str] {
        match self.0.has_nested_paging() {
            true => &["kvm-amd.ko"],
            false => &["kvm-amd.ko npt=0"],
        }
    }

    fn network(&self) -> Option<&'static [&'static str]> {
        Some(&["virtio_pci.ko", "virtio_net.ko"])
    }

    fn start(&self, plan: &Plan<'_>) -> Result<(Group, Streams)> {
        let (cpus, cmdline) = match plan.cpus {
            1 => (1, CMDLINE.to_owned()),
            several => (several + 1, format!("{CMDLINE} {SPARE}")),
        };
        let mut command = self.0.command();
        command
            .args(["-accel", "tcg,thread=multi", "-cpu", PROCESSOR])
            .args(["-m", &plan.memory.to_string()])
            .args(["-smp", &cpus.to_string()])
            .args([
                "-nographic",
                "-nodefaults",
                "-serial",
                "stdio",
                "-no-reboot",
            ])
            .arg("-serial")
            .arg(format!("file:{}", plan.folder.join(MESSAGES).display()))
            .arg("-kernel")
            .arg(plan.kernel)
            .arg("-initrd")
            .arg(plan.initrd)
            .args(["-append", &cmdline])
            .stdin(if plan.input {
                Stdio::piped()
            } else {
                Stdio::null()
            })
            .stdout(Stdio::piped())
            .stderr(plan.complaints()?);
        if let Some(port) = plan.forward {
            // The network has only this one forwarded port, and no firmware boots from the card.
            let forward = format!("hostfwd=tcp:127.0.0.1:{port}-:{port}");
            command
                .arg("-netdev")
                .arg(format!("user,id=net,restrict=on,{forward}"))
                .args(["-device", "virtio-net-pci,netdev=net,romfile="]);
        }
        let mut group = Group::start(&mut command, Apart::Group)?;
        let output = group.child().stdout.take().context("QEMU has no output")?;
        let streams = Streams {
            output: Some(File::from(OwnedFd::from(output))),
            discard: None,
            keyboard: None,
        };
        Ok((group, streams))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_without_xsave_has_nothing_that_needs_it() {
        let words: Vec<&str> = PROCESSOR.split(',').collect();
        assert!(words.contains(&"-xsave"));
        for needs in ["avx", "avx2", "f16c", "fma", "vaes", "vpclmulqdq"] {
            let hidden = format!("-{needs}");
            assert!(words.contains(&hidden.as_str()), "{needs}");
        }
    }
}
