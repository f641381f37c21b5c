//! `cargo lab setup`: the packages, the kernel and the guest image that everything else needs.
//!
//! Each part is done only if it is missing, so that a second run costs little, and the other
//! commands start with it.

use anyhow::{Context, Result, bail};

use crate::cargo::{self, Workspace};
use crate::kernel::Kernel;
use crate::place::{Cache, replace_if_different};
use crate::rig::Kind;
use crate::{image, packages};

/// What setup leaves behind for the other commands.
#[derive(Clone, Debug)]
pub(crate) struct Ready {
    pub(crate) workspace: Workspace,
    pub(crate) cache: Cache,
    pub(crate) kernel: Kernel,
}

impl Ready {
    /// Makes sure that `kind` of rig can run. `update` asks for Debian's current kernel even if
    /// there is one; without `build` a guest image that is there is taken as it is.
    pub(crate) fn make(kind: Kind, update: bool, build: bool) -> Result<Self> {
        if cfg!(not(target_arch = "x86_64")) {
            bail!("the lab needs an x86-64 machine");
        }
        let workspace = Workspace::locate()?;
        let cache = Cache::locate()?;
        let _lock = cache.lock()?;
        packages::ensure(kind.packages())?;
        let kernel = Kernel::obtain(&cache, update)?;
        if build || !cache.guest_initrd().exists() || !cache.guest_kernel().exists() {
            make_guest(&workspace, &cache, &kernel)?;
        }
        Ok(Self {
            workspace,
            cache,
            kernel,
        })
    }
}

/// Puts the guest's kernel and its initramfs, with a fresh workload program, into the cache.
fn make_guest(workspace: &Workspace, cache: &Cache, kernel: &Kernel) -> Result<()> {
    let built = workspace.build(&["--package=hvprobe-workload"])?;
    let workload = cargo::program_named(&built, "workload")?;
    let initrd = image::guest(&workload, kernel).context("cannot build the guest image")?;
    replace_if_different(&cache.guest_initrd(), &initrd)?;
    let bytes = std::fs::read(kernel.image()).context("cannot read the guest kernel")?;
    replace_if_different(&cache.guest_kernel(), &bytes)?;
    Ok(())
}
