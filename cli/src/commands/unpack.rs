//! `hvprobe unpack`: writes the ELF kernel of a `bzImage` into a file.

use std::process::ExitCode;

use anyhow::Context as _;
use hvprobe_vmlinux::Kernel;

use crate::failure::DONE;
use crate::options::command_line::Unpack;

pub(crate) fn unpack(args: &Unpack) -> anyhow::Result<ExitCode> {
    let kernel = Kernel::open(&args.kernel)
        .with_context(|| format!("cannot unpack {}", args.kernel.display()))?;
    std::fs::write(&args.vmlinux, kernel.elf())
        .with_context(|| format!("cannot write {}", args.vmlinux.display()))?;
    Ok(DONE)
}
