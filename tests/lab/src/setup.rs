//! `cargo lab setup`: the packages, the kernel and the guest image that everything else needs.
//!
//! Each part is done only if it is missing, so a second run takes little time. The other commands begin with the
//! setup.

use anyhow::{Context, Result, bail};

use crate::cargo::{self, Workspace};
use crate::kernel::{Choice, Kernel};
use crate::kind::Kind;
use crate::place::{Cache, Guest, replace_if_different};
use crate::qemu::Qemu;
use crate::{image, packages};

/// Result of the setup, for the other commands.
#[derive(Clone, Debug)]
pub(crate) struct Ready {
    pub(crate) workspace: Workspace,
    pub(crate) cache: Cache,
    /// The stock kernel, which rigs boot.
    pub(crate) kernel: Kernel,
    pub(crate) guest: Guest,
    /// QEMU, if the kind of rig needs it.
    pub(crate) qemu: Option<Qemu>,
}

impl Ready {
    /// Makes sure that a rig of this `kind` can run, with guests that have the kernel of `choice`, or else the
    /// stock one.
    pub(crate) fn make(kind: Kind, choice: Option<&Choice>) -> Result<Self> {
        Self::make_with(kind, false, true, choice)
    }

    /// Like [`make`](Self::make). If `update`, looks for newer versions of the cached kernel and QEMU. Without
    /// `build`, an existing guest image is used as it is.
    pub(crate) fn make_with(
        kind: Kind,
        update: bool,
        build: bool,
        choice: Option<&Choice>,
    ) -> Result<Self> {
        if cfg!(not(target_arch = "x86_64")) {
            bail!("the lab needs an x86-64 machine");
        }
        let workspace = Workspace::locate()?;
        let cache = Cache::locate()?;
        let _lock = cache.lock()?;
        packages::ensure(kind.packages())?;
        let qemu = match kind {
            Kind::Tcg => Some(Qemu::obtain(&cache, update)?),
            Kind::Bochs | Kind::Direct => None,
        };
        let kernel = Kernel::obtain(&cache, update)?;
        let guest = match choice {
            Some(choice) => cache.other_guest(&choice.folder_name()),
            None => cache.guest(),
        };
        if build || !guest.initrd().exists() || !guest.kernel().exists() {
            make_guest(&workspace, &cache, &kernel, &guest, choice)?;
        }
        Ok(Self {
            workspace,
            cache,
            kernel,
            guest,
            qemu,
        })
    }
}

/// Puts a guest's kernel and initramfs into the cache. The kernel is that of `choice`, or `stock` without a choice.
/// Builds the workload program for the initramfs.
fn make_guest(
    workspace: &Workspace,
    cache: &Cache,
    stock: &Kernel,
    guest: &Guest,
    choice: Option<&Choice>,
) -> Result<()> {
    let built = workspace.build(&["--bin=workload"])?;
    let workload = cargo::program_named(&built, "workload")?;
    let (image, kernel) = match choice {
        Some(Choice::File(file)) => (file.clone(), None),
        // No modules are built for such a kernel, because hvprobe could not find them.
        Some(Choice::Built(built)) => (built.image(cache)?, None),
        Some(Choice::Named(named)) if !stock.is(named) => {
            let kernel = Kernel::named(cache, named)?;
            (kernel.image().to_path_buf(), Some(kernel))
        }
        Some(Choice::Named(_)) | None => (stock.image().to_path_buf(), Some(stock.clone())),
    };
    let initrd =
        image::guest(&workload, kernel.as_ref()).context("cannot build the guest image")?;
    replace_if_different(&guest.initrd(), &initrd)?;
    let bytes = std::fs::read(image).context("cannot read the guest kernel")?;
    replace_if_different(&guest.kernel(), &bytes)?;
    Ok(())
}
