//! What tests with micro-kernels do on the host's side.

use std::sync::mpsc;
use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_machine::{Ending, Event, Machine, MachineConfig};
use hvprobe_vm::{CatchMode, host};

use super::{Asm, MicroKernel, RESULTS};
use crate::rig::Running;

/// Far beyond what any host needs: past it something hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// How int3s are caught here; `None`, and a line that says so, where there is no KVM.
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

/// Builds the micro-kernel whose `main` is what `body` assembles; the folder must outlive its boot.
///
/// # Panics
/// When it cannot be built.
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

/// The result of `work`, which must not hang.
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
        // Whoever waited has given up, and says so.
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

/// The result of `work`, which waits for a guest that may not do its part: longer than the engine
/// waits for one, and no more.
///
/// # Panics
/// When it takes longer, or panics.
pub fn hangs_not<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    within(what, Duration::from_secs(30), work)
}

/// Boots `config` and waits for the guest's end; all events are returned.
///
/// # Panics
/// When it cannot be booted, hangs, or loses events.
#[must_use]
pub fn run(config: MachineConfig) -> (std::sync::Arc<Machine>, Ending, Vec<Event>) {
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    let (_, events, _) = within_limit("the guest", move || running.finish());
    let ending = machine.wait();
    (machine, ending, events)
}

/// The word at `offset` in [`RESULTS`].
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

/// Address of the micro-kernel's function or label `name`.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn symbol(machine: &Machine, name: &str) -> u64 {
    match machine.image().symbols().lookup(name) {
        Ok(symbol) => symbol.addr.0,
        Err(error) => panic!("{error}"),
    }
}
