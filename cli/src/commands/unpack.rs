//! `hvprobe unpack`: writes the ELF kernel of a `bzImage` into a file.

use std::process::ExitCode;

use anyhow::Context as _;
use hvprobe_vmlinux::Kernel;

use crate::definitions::kernels;
use crate::failure::DONE;
use crate::options::command_line::Unpack;

pub(crate) fn unpack(args: &Unpack) -> anyhow::Result<ExitCode> {
    let path = kernels::named(&args.kernel)?;
    let kernel =
        Kernel::open(&path).with_context(|| format!("cannot unpack {}", path.display()))?;
    std::fs::write(&args.vmlinux, kernel.elf())
        .with_context(|| format!("cannot write {}", args.vmlinux.display()))?;
    Ok(DONE)
}
