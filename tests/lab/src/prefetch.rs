//! What a command will need is fetched and installed while cargo builds: one waits for the network, the other
//! for the processors.
//!
//! Nothing depends on it: what is missing when it is needed is fetched then, and errors are reported there.

use std::path::Path;
use std::thread::{self, JoinHandle};

use anyhow::Result;

use crate::clients;
use crate::kernel::{Kernel, NAMED};
use crate::packages;
use crate::place::Cache;
use crate::rig::Kind;

/// What is fetched: the stock kernel and what runs it, and these.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Other kernels, by their names.
    pub(crate) kernels: Vec<&'static str>,
    /// gRPC of other languages.
    pub(crate) clients: bool,
}

/// A fetch that goes on until this is dropped, or all is there.
#[derive(Debug)]
pub(crate) struct Fetch(Option<JoinHandle<()>>);

impl Fetch {
    pub(crate) fn start(wanted: Wanted) -> Self {
        Self(Some(thread::spawn(move || drop(fetch(&wanted)))))
    }
}

impl Drop for Fetch {
    /// Waits for its end: two that install packages would be in each other's way.
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

/// The rig that will probably be chosen. The choice needs the program that is being built.
fn likely() -> Kind {
    let modules = ["/sys/module/kvm_intel", "/sys/module/kvm_amd"];
    match modules.iter().any(|module| Path::new(module).exists()) {
        true => Kind::Direct,
        false => Kind::Tcg,
    }
}
