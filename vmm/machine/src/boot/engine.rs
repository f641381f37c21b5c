//! Puts the probe engine on the hardware of a machine.
//!
//! Invariant: the probes of the configuration are registered before any thread of the machine starts, so a refused
//! probe can fail the boot.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Instant;

use hvprobe_engine::{HiddenRegion, Registry};
use hvprobe_hit::aggregate::MemoryBudget;
use hvprobe_hit::event::{Collector, EventProducer};
use hvprobe_hit::record::{Collection, Reader};
use hvprobe_hit::region::KERNEL_WINDOW;
use hvprobe_linux::image::KernelImage;
use hvprobe_vm::CatchMode;
use hvprobe_vm::memory::GuestRam;
use kvm_ioctls::VmFd;

use super::board::Board;
use super::error::BootError;
use crate::aggregate::AGGREGATION_BYTES;
use crate::clock::host::HostClock;
use crate::clock::relation::{Kvmclock, Relation, Timeline};
use crate::clock::times::Times;
use crate::config::MachineConfig;
use crate::decide::Decisions;
use crate::detours::Detours;
use crate::events::subscription::Hub;
use crate::guest::Guest;
use crate::machine::{Life, Machine};
use crate::metrics::Metrics;
use crate::stop::control::Control;
use crate::tripwire::Tripwire;
use crate::vcpu::shared::Shared;

/// Number of events that fit into the ring of one vCPU.
const RING: usize = 8192;

/// A machine whose threads have not been started yet, except for the collector of events.
pub(super) struct Ready {
    pub(super) machine: Arc<Machine>,
    pub(super) vm: Arc<VmFd>,
    /// The clock of each vCPU.
    pub(super) clocks: Vec<HostClock>,
    /// The writing end of each vCPU's ring of events.
    pub(super) producers: Vec<EventProducer>,
    pub(super) collector: Collector,
}

/// Makes a machine of `board`, which has `cpus` vCPUs and the kernel of `image` in its memory.
pub(super) fn install(
    config: MachineConfig,
    mode: CatchMode,
    image: Arc<KernelImage>,
    tripwire: Tripwire,
    board: Board,
    cpus: usize,
) -> Result<Ready, BootError> {
    let Board {
        vm,
        ram,
        devices,
        console,
        ..
    } = board;
    let (hidden_at, hidden_size) = ram.hidden();
    let hidden = HiddenRegion::new(hidden_at, hidden_size, KERNEL_WINDOW);
    let mut registry = Registry::new(Arc::clone(&image), cpus, hidden)
        .with_optimization(config.optimize)
        .with_room(config.bounds.probes);
    let ram = Arc::new(ram);
    let reader = registry.ring();
    let Clocks {
        times,
        clocks,
        timeline,
    } = Clocks::new(&vm, &ram, cpus, reader.as_ref());
    let collection = reader.map(Collection::new);
    let detours = Detours::new(Arc::clone(&ram), timeline, collection);
    let shared = Arc::new(Shared {
        control: Control::new(cpus),
        ram,
        devices,
        tripwire: Some(tripwire),
        gate: OnceLock::new(),
        metrics: Metrics::new(cpus),
        claims: Mutex::default(),
        decisions: Decisions::default(),
        detours: detours.clone(),
        times,
        noting_writes: AtomicBool::new(false),
    });
    if config.paused {
        shared.claims().pause(None);
        shared.control.pause_now();
    }
    let registered = registry.register_batch(&config.probes, config.refusals, &Guest(&shared))?;

    let hub = Arc::new(Hub::open());
    let sink = Arc::clone(&hub);
    let (collector, producers) = Collector::start_with(
        vec![Box::new(detours.clone())],
        cpus,
        RING,
        Box::new(move |events, dropped| sink.deliver(events, dropped)),
    )
    .map_err(BootError::Thread)?;
    if let Some(thread) = collector.thread() {
        detours.set_collector(thread.clone());
    }
    let machine = Arc::new(Machine {
        config,
        mode,
        image,
        shared,
        armed: AtomicBool::new(registry.is_armed()),
        registry: Mutex::new(registry),
        registered,
        console,
        hub,
        flush: collector.flush(),
        aggregations: Arc::default(),
        histograms: Arc::new(MemoryBudget::new(AGGREGATION_BYTES)),
        throttle_looked: Mutex::new(Instant::now()),
        life: Mutex::new(Life {
            live: false,
            kernel_replaced: false,
            ending: None,
        }),
        changed: Condvar::new(),
    });
    Ok(Ready {
        machine,
        vm,
        clocks,
        producers,
        collector,
    })
}

/// The clocks that give events their times.
struct Clocks {
    times: Arc<Times>,
    /// One clock for the hits of each vCPU.
    clocks: Vec<HostClock>,
    /// The clock for the records of detours.
    timeline: Timeline,
}

impl Clocks {
    /// Creates the clocks of a machine with `cpus` vCPUs. `reader` reads the ring that detours record into, if
    /// there is one.
    fn new(vm: &Arc<VmFd>, ram: &Arc<GuestRam>, cpus: usize, reader: Option<&Reader>) -> Self {
        let times = Arc::new(Times::new());
        let vm = Arc::downgrade(vm);
        let kvmclock = Kvmclock::new(move || Some(vm.upgrade()?.get_clock().ok()?.clock));
        let head = reader.map(|reader| reader.place().head);
        let relations: Box<[_]> = (0..cpus)
            .map(|_| Arc::new(Relation::new(Arc::clone(ram), head)))
            .collect();
        let clocks = relations
            .iter()
            .map(|relation| {
                HostClock::new(Arc::clone(&times), Arc::clone(relation), kvmclock.clone())
            })
            .collect();
        let timeline = Timeline::new(Arc::clone(&times), relations, kvmclock);
        Self {
            times,
            clocks,
            timeline,
        }
    }
}
