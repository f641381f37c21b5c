//! Starts the threads of a machine.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};

use hvprobe_hit::HitHandler;
use hvprobe_vm::vcpu::CpuFd;
use tracing::debug;

use super::engine::Ready;
use super::error::BootError;
use crate::machine::Machine;
use crate::vcpu::catch::Catcher;
use crate::vcpu::run::Vcpu;

/// Starts a thread for each of `cpus`, and the supervisor.
pub(super) fn start(ready: Ready, cpus: Vec<CpuFd>) -> Result<Arc<Machine>, BootError> {
    let Ready {
        machine,
        vm,
        clocks,
        producers,
        collector,
    } = ready;
    let (notices, inbox) = channel();
    let mut threads = Vec::with_capacity(cpus.len());
    let each = cpus.into_iter().zip(clocks).zip(producers);
    for (index, ((cpu, clock), events)) in each.enumerate() {
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let vcpu = Vcpu {
            index,
            cpu,
            catcher: Catcher::new(machine.mode, HitHandler::new(number, events), clock),
            shared: Arc::clone(&machine.shared),
            notices: notices.clone(),
            waited_since: None,
        };
        threads.push(spawn(&machine, format!("vcpu{index}"), move || vcpu.run())?);
    }
    debug!("virtual CPUs started");
    let supervised = Arc::clone(&machine);
    spawn(&machine, "supervisor".to_owned(), move || {
        supervised.supervise(&inbox, threads, collector);
        // Drops the VM only here, after its vCPUs.
        drop(vm);
    })?;
    Ok(machine)
}

/// Starts a thread. If that fails, ends the vCPUs' threads that have been started already.
fn spawn(
    machine: &Machine,
    name: String,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, BootError> {
    let thread = thread::Builder::new().name(name).spawn(run);
    thread.map_err(|error| {
        machine.shared.control.end();
        BootError::Thread(error)
    })
}
