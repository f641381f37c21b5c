//! Fetches and installs what a command will need, while cargo builds. The two do not compete, because fetching
//! mostly waits for the network, and building for the processors.
//!
//! Nothing depends on this: what is still missing when it is needed is fetched then, and only then errors are
//! reported.

use std::path::Path;
use std::thread::{self, JoinHandle};

use anyhow::Result;

use crate::clients;
use crate::kernel::{Kernel, NAMED};
use crate::kind::Kind;
use crate::packages;
use crate::place::Cache;
use crate::qemu::Qemu;

/// What to fetch besides the stock kernel and the packages that run it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Names of other kernels.
    pub(crate) kernels: Vec<&'static str>,
    /// Whether to fetch the gRPC clients of other languages.
    pub(crate) clients: bool,
}

/// A fetch in a thread. Dropping this waits until the fetch has ended.
#[derive(Debug)]
pub(crate) struct Fetch(Option<JoinHandle<()>>);

impl Fetch {
    pub(crate) fn start(wanted: Wanted) -> Self {
        Self(Some(thread::spawn(move || drop(fetch(&wanted)))))
    }
}

impl Drop for Fetch {
    /// Waits, because two installations of packages would get in each other's way.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

fn fetch(wanted: &Wanted) -> Result<()> {
    let cache = Cache::locate()?;
    let lock = cache.lock()?;
    packages::ensure(likely().packages())?;
    if likely() == Kind::Tcg {
        Qemu::obtain(&cache, false)?;
    }
    Kernel::obtain(&cache, false)?;
    for kernel in NAMED.iter().filter(|it| wanted.kernels.contains(&it.name)) {
        Kernel::named(&cache, kernel)?;
    }
    drop(lock);
    if wanted.clients {
        clients::environment(&cache)?;
    }
    Ok(())
}

/// Returns the rig that will probably be chosen. The actual choice needs `hvprobe`, which is still being built.
fn likely() -> Kind {
    let modules = ["/sys/module/kvm_intel", "/sys/module/kvm_amd"];
    match modules.iter().any(|module| Path::new(module).exists()) {
        true => Kind::Direct,
        false => Kind::Tcg,
    }
}
