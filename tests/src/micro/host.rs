//! The host's side of tests with micro-kernels.

use std::sync::mpsc;
use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_machine::{Ending, Event, Machine, MachineConfig};
use hvprobe_vm::{CatchMode, host};

use super::kernel::{Asm, MicroKernel, RESULTS};
use crate::rig::Running;

/// Time limit, far beyond what any host needs: work that takes longer counts as hanging.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns how int3s leave the guest on this host. Without a suitable KVM, prints that the test is skipped and
/// returns `None`.
#[must_use]
pub fn catch_mode(test: &str) -> Option<CatchMode> {
    match host::check() {
        Ok(report) if report.catch_mode.is_some() => report.catch_mode,
        Ok(_) => {
            eprintln!("skipped: {test} needs a KVM that lets int3 be caught");
            None
        }
        Err(error) => {
            eprintln!("skipped: {test} needs KVM: {error}");
            None
        }
    }
}

/// Builds the micro-kernel whose `main` is assembled by `body`. The returned folder contains the kernel's file, and
/// must outlive the boot.
///
/// # Panics
/// When the kernel cannot be built.
#[must_use]
pub fn build(body: impl FnOnce(&mut MicroKernel) -> Asm<()>) -> (tempfile::TempDir, MachineConfig) {
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => panic!("no temporary folder: {error}"),
    };
    let kernel = match MicroKernel::assemble(body) {
        Ok(kernel) => kernel,
        Err(error) => panic!("the code cannot be assembled: {error}"),
    };
    match kernel.build(folder.path()) {
        Ok(config) => (folder, config),
        Err(error) => panic!("the micro-kernel cannot be built: {error}"),
    }
}

/// Returns the result of `work`, which must not hang.
///
/// # Panics
/// When it hangs or panics.
pub fn within_limit<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    within(what, LIMIT, work)
}

fn within<T: Send + 'static>(
    what: &str,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (to, from) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        // The caller may have given up. It reports that itself.
        let _ = to.send(work());
    });
    match from.recv_timeout(limit) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what} took more than {limit:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => panic!("{what} has no result"),
        },
    }
}

/// Returns the result of `work`, which may wait for a guest that does not react. The limit is longer than that of
/// the engine for such a wait, and shorter than that of [`within_limit`].
///
/// # Panics
/// When `work` takes longer, or panics.
pub fn hangs_not<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    within(what, Duration::from_secs(30), work)
}

/// Boots `config` and waits for the guest's end. Returns all events.
///
/// # Panics
/// When the guest cannot be booted, hangs, or loses events.
#[must_use]
pub fn run(config: MachineConfig) -> (std::sync::Arc<Machine>, Ending, Vec<Event>) {
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    let (_, events, _) = within_limit("the guest", move || running.finish());
    let ending = machine.wait();
    (machine, ending, events)
}

/// Returns the word at `offset` in [`RESULTS`].
///
/// # Panics
/// When it cannot be read.
#[must_use]
pub fn result(machine: &Machine, offset: u64) -> u64 {
    let mut raw = [0; 8];
    if let Err(error) = machine.read_kernel(Gva(RESULTS + offset), &mut raw) {
        panic!("results cannot be read: {error}");
    }
    u64::from_le_bytes(raw)
}

/// Returns the address of the micro-kernel's function or label `name`.
///
/// # Panics
/// When there is no such symbol.
#[must_use]
pub fn symbol(machine: &Machine, name: &str) -> u64 {
    match machine.image().symbols().lookup(name) {
        Ok(symbol) => symbol.addr.0,
        Err(error) => panic!("{error}"),
    }
}
