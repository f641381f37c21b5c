//! `hvprobe unpack`: writes the ELF kernel of a `bzImage` into a file.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use hvprobe_vmlinux::Kernel;

use crate::definitions::kernels;
use crate::failure::DONE;
use crate::options::command_line::Unpack;

pub(crate) fn unpack(args: &Unpack) -> anyhow::Result<ExitCode> {
    let path = kernels::named(&args.kernel)?;
    // `hvprobe unpack . vmlinux` in a kernel's tree would replace the file that has the debug information.
    let own = args.kernel.join("vmlinux");
    if args.kernel.is_dir() && own.exists() && same_file(&own, &args.vmlinux) {
        bail!(
            "{} is what the build of this kernel has made; name another file",
            own.display()
        );
    }
    let kernel =
        Kernel::open(&path).with_context(|| format!("cannot unpack {}", path.display()))?;
    std::fs::write(&args.vmlinux, kernel.elf())
        .with_context(|| format!("cannot write {}", args.vmlinux.display()))?;
    Ok(DONE)
}

/// Returns whether the two paths lead to the same file, which exists.
fn same_file(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    real(one).is_some_and(|one| real(other) == Some(one))
}
