//! Boots a machine from its configuration.
//!
//! ```text
//!   memory, files ([`files`]) ──► hardware ([`board`]) ──► engine ([`engine`]) ──► threads ([`threads`])
//! ```
//! Invariants: everything that can be refused is checked before a thread runs the guest. A failed boot leaves
//! nothing behind.

use std::panic::resume_unwind;
use std::sync::{Arc, OnceLock};
use std::thread;

use hvprobe_vm::CatchMode;
use hvprobe_vm::host;
use tracing::debug;

use crate::config::MachineConfig;
use crate::kernel_file::KernelFile;
use crate::machine::Machine;
use crate::tripwire::Tripwire;

mod board;
mod engine;
mod error;
mod files;
mod threads;

use board::Board;
pub use error::BootError;
use files::Files;

/// Returns how this host catches int3s. The host is checked once per process.
fn catch_mode() -> Result<CatchMode, BootError> {
    static FOUND: OnceLock<Option<CatchMode>> = OnceLock::new();
    let found = match FOUND.get() {
        Some(found) => *found,
        None => *FOUND.get_or_init({
            let found = host::catch_mode()?;
            move || found
        }),
    };
    found.ok_or(BootError::NoCatchMode)
}

impl Machine {
    /// Boots a machine. Its guest runs when this returns, unless the configuration says
    /// [`paused`](MachineConfig::paused). Probes of the configuration are pending until the kernel's text is final.
    ///
    /// # Errors
    /// When the configuration, its files, its probes or the host do not allow it.
    pub fn boot(config: MachineConfig) -> Result<Arc<Self>, BootError> {
        Self::boot_with(config, None)
    }

    /// As [`Machine::boot`], but boots `kernel` instead of the kernel that the configuration names, whose file is
    /// not read, and where `kernel` is already placed, even if the command line has `nokaslr`. Many machines of one kernel boot faster that way, and share its symbols.
    ///
    /// # Errors
    /// As [`Machine::boot`].
    pub fn boot_from(
        config: MachineConfig,
        kernel: Arc<KernelFile>,
    ) -> Result<Arc<Self>, BootError> {
        Self::boot_with(config, Some(kernel))
    }

    fn boot_with(
        config: MachineConfig,
        kernel: Option<Arc<KernelFile>>,
    ) -> Result<Arc<Self>, BootError> {
        // The self-check of the host runs a micro-guest, on another thread. Meanwhile the files are read and
        // unpacked here. Then the kernel is loaded while a third thread reads its symbols.
        thread::scope(|scope| {
            let mode = scope.spawn(catch_mode);
            let ram = board::memory(&config)?;
            let files = Files::read(&config, kernel, &ram)?;
            debug!("files read");
            let image = scope.spawn({
                let kernel = Arc::clone(&files.kernel);
                move || kernel.image()
            });
            let board = Board::new(&config, ram)?;
            let firmware = board.write_firmware()?;
            let entry = board.load(files, &config.cmdline, &firmware)?;
            debug!("kernel loaded");
            let image = image.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            let mode = mode.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            debug!("symbols read, host checked");
            let tripwire = Tripwire::set(&image, &board.ram)?;
            let cpus = board.create_cpus(&entry, mode)?;
            let ready = engine::install(config, mode, image, tripwire, board, cpus.len())?;
            threads::start(ready, cpus)
        })
    }
}
