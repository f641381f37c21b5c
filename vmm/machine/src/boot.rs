//! Boots a machine from its configuration.
//!
//! Everything that can be refused is checked before a thread starts. A failed boot leaves nothing behind.

use std::error::Error;
use std::io::Read as _;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use hvprobe_devices::{AcpiError, COM1_GSI, ClaimError, Devices};
use hvprobe_engine::{HiddenRegion, RegisterError, Registry};
use hvprobe_hit::HitHandler;
use hvprobe_hit::aggregate::Room;
use hvprobe_hit::event::{Collector, EventProducer};
use hvprobe_hit::record::Collection;
use hvprobe_hit::region::KERNEL_WINDOW;
use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_vm::host::{self, SelfCheckError};
use hvprobe_vm::loader::{self, LoadError};
use hvprobe_vm::memory::{GuestRam, MemoryError};
use hvprobe_vm::vcpu::{CpuFd, configure};
use hvprobe_vm::{ACPI_TABLES, CatchMode, CpuError, Entry, check_count, create_vm, pulse};
use hvprobe_vmlinux::open_file;
use kvm_ioctls::{Kvm, VmFd};
use tracing::debug;

use crate::aggregate::AGGREGATION_BYTES;
use crate::clock::host::HostClock;
use crate::clock::relation::{Kvmclock, Relation, Timeline};
use crate::clock::times::Times;
use crate::config::{DEFAULT_CMDLINE, MachineConfig};
use crate::console::ConsoleOutput;
use crate::decide::Decisions;
use crate::detours::Detours;
use crate::events::subscription::Hub;
use crate::guest::Guest;
use crate::kernel_file::KernelFile;
use crate::machine::{Life, Machine};
use crate::stop::control::Control;
use crate::tripwire::{NoTripwire, Tripwire};
use crate::vcpu::catch::Catcher;
use crate::vcpu::run::Vcpu;
use crate::vcpu::shared::Shared;

/// Number of events that fit into the ring of one vCPU.
const RING: usize = 8192;

/// Maximum size of an initramfs, which has to lie below the hole under 4 GiB.
const MAX_INITRD: u64 = 3 << 30;

/// Error of booting a machine. Nothing of the machine is left.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel, command line or initramfs cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The initramfs file cannot be read.
    #[error("cannot read the initrd {path}")]
    Initrd {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        #[source]
        source: std::io::Error,
    },
    /// The kernel's symbols cannot be found.
    #[error("the kernel image cannot be probed")]
    Image(#[from] ImageError),
    /// The image has no place for a tripwire, which reports that the kernel's text is final.
    #[error(transparent)]
    NoTripwire(#[from] NoTripwire),
    /// A probe of the configuration was refused.
    #[error(transparent)]
    Probe(#[from] RegisterError),
    /// The memory cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The host cannot run the machine.
    #[error(transparent)]
    Host(#[from] SelfCheckError),
    /// The host runs guests, but its KVM does not let int3s be caught.
    #[error("breakpoints cannot be caught on this host: `hvprobe doctor` shows why")]
    NoCatchMode,
    /// KVM refused a request.
    #[error("KVM cannot {what}")]
    Kvm {
        /// The request.
        what: &'static str,
        /// KVM's error.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// The vCPUs cannot be set up.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// Two devices have the same addresses.
    #[error(transparent)]
    Device(#[from] ClaimError),
    /// The firmware tables cannot be built.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// A thread cannot be started.
    #[error("a thread cannot be started")]
    Thread(#[source] std::io::Error),
}

impl BootError {
    /// Returns whether the host ran out of descriptors, processes or memory, which is temporary (errno(3)).
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        let mut cause: Option<&(dyn Error + 'static)> = Some(self);
        while let Some(error) = cause {
            let kvm = error.downcast_ref::<kvm_ioctls::Error>();
            let io = error.downcast_ref::<std::io::Error>();
            let number = kvm
                .map(|kvm| kvm.errno())
                .or(io.and_then(|io| io.raw_os_error()));
            if let Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN) = number {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> BootError {
    move |source| BootError::Kvm { what, source }
}

/// Returns how this host catches int3s. Checked once per process.
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
    /// Boots a machine. It runs when this returns; probes of the configuration are pending until the kernel's
    /// text is final.
    ///
    /// # Errors
    /// When the configuration, its files, its probes or the host do not allow it.
    pub fn boot(config: MachineConfig) -> Result<Arc<Self>, BootError> {
        Self::boot_with(config, None)
    }

    /// As [`Machine::boot`], with the kernel in `kernel` instead of the configuration's, whose file is not read.
    /// Many machines of one kernel boot faster that way, and share its symbols.
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
        // The self-check runs a guest of its own. Meanwhile the files are read and unpacked, and then the
        // kernel is loaded while its symbols are read.
        thread::scope(|scope| {
            let mode = scope.spawn(catch_mode);
            let files = Files::read(&config, kernel)?;
            debug!("files read");
            let image = scope.spawn({
                let kernel = Arc::clone(&files.kernel);
                move || kernel.image()
            });
            let loaded = Loaded::new(&config, files)?;
            debug!("kernel loaded");
            let image = image.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            let mode = mode.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            debug!("symbols read, host checked");
            start(config, mode, image, loaded)
        })
    }
}

/// Files of the configuration, read before any resource of the host is taken.
struct Files {
    kernel: Arc<KernelFile>,
    initrd: Vec<Vec<u8>>,
    ram: GuestRam,
}

impl Files {
    fn read(config: &MachineConfig, kernel: Option<Arc<KernelFile>>) -> Result<Self, BootError> {
        let ram = GuestRam::with_hidden(config.memory, HiddenRegion::FULL_SIZE)?;
        let kernel = match kernel {
            Some(kernel) => kernel,
            None => Arc::new(KernelFile::open(&config.kernel)?),
        };
        let mut initrd = Vec::new();
        if let Some(path) = &config.initrd {
            let source = |source| BootError::Initrd {
                path: path.clone(),
                source,
            };
            // One byte more than can fit is enough for the loader to refuse it.
            let limit = config.memory.min(MAX_INITRD) + 1;
            let mut archive = Vec::new();
            open_file(path)
                .and_then(|file| file.take(limit).read_to_end(&mut archive))
                .map_err(source)?;
            initrd.push(archive);
        }
        if !config.command.is_empty() {
            initrd.push(loader::command_archive(&config.command)?);
        }
        Ok(Self {
            kernel,
            initrd,
            ram,
        })
    }
}

/// A virtual machine with its memory loaded, but without vCPUs.
struct Loaded {
    host: Kvm,
    vm: Arc<VmFd>,
    ram: GuestRam,
    console: Arc<ConsoleOutput>,
    devices: Devices,
    entry: Entry,
}

impl Loaded {
    fn new(config: &MachineConfig, files: Files) -> Result<Self, BootError> {
        let host = host::open_kvm()?;
        check_count(&host, config.cpus)?;
        let vm = Arc::new(create_vm(&host)?);
        let ram = files.ram;
        ram.register(&vm)?;
        let console = Arc::new(ConsoleOutput::new(config.bounds.console));
        let devices = devices(&vm, &console)?;
        let rsdp = devices.write_acpi(&ram, ACPI_TABLES, config.cpus)?;
        let cmdline = match config.cmdline.trim() {
            "" => DEFAULT_CMDLINE,
            given => given,
        };
        let pieces: Vec<&[u8]> = files.initrd.iter().map(Vec::as_slice).collect();
        let entry = loader::load(files.kernel.kernel(), &ram, &pieces, cmdline, rsdp)?;
        Ok(Self {
            host,
            vm,
            ram,
            console,
            devices,
            entry,
        })
    }
}

/// Creates the devices of `vm`, whose output goes to `console`.
fn devices(vm: &Arc<VmFd>, console: &Arc<ConsoleOutput>) -> Result<Devices, ClaimError> {
    let lines = Arc::downgrade(vm);
    let interrupt = move || {
        let vm = lines.upgrade();
        vm.map_or(Ok(()), |vm| pulse(&vm, COM1_GSI))
    };
    Devices::new(interrupt, Arc::clone(console) as _)
}

fn start(
    config: MachineConfig,
    mode: CatchMode,
    image: Arc<KernelImage>,
    loaded: Loaded,
) -> Result<Arc<Machine>, BootError> {
    let Loaded {
        host,
        vm,
        ram,
        console,
        devices,
        entry,
    } = loaded;
    let tripwire = Tripwire::set(&image, &ram)?;
    let cpus: Vec<CpuFd> = (0..config.cpus)
        .map(|index| create_cpu(&host, &vm, index, &config, &entry, mode))
        .collect::<Result<_, _>>()?;

    let (hidden_at, hidden_size) = ram.hidden();
    let hidden = HiddenRegion::new(hidden_at, hidden_size, KERNEL_WINDOW);
    let mut registry = Registry::new(Arc::clone(&image), cpus.len(), hidden)
        .with_optimization(config.optimize)
        .with_room(config.bounds.probes);
    let ram = Arc::new(ram);
    let times = Arc::new(Times::new());
    let clock = Arc::downgrade(&vm);
    let kvmclock = Kvmclock::new(move || Some(clock.upgrade()?.get_clock().ok()?.clock));
    let reader = registry.ring();
    let head = reader.as_ref().map(|reader| reader.place().head);
    let relations: Box<[_]> = cpus
        .iter()
        .map(|_| Arc::new(Relation::new(Arc::clone(&ram), head)))
        .collect();
    let clocks: Vec<_> = relations
        .iter()
        .map(|relation| HostClock::new(Arc::clone(&times), Arc::clone(relation), kvmclock.clone()))
        .collect();
    let timeline = Timeline::new(Arc::clone(&times), relations, kvmclock);
    let collection = reader.map(Collection::new);
    let detours = Detours::new(Arc::clone(&ram), timeline, collection);
    let shared = Arc::new(Shared {
        control: Control::new(cpus.len()),
        ram,
        devices,
        tripwire: Some(tripwire),
        gate: OnceLock::new(),
        first_entry_ns: AtomicU64::new(0),
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
        cpus.len(),
        RING,
        Box::new(move |events, dropped| sink.deliver(events, dropped)),
    )
    .map_err(BootError::Thread)?;
    if let Some(thread) = collector.thread() {
        detours.set_collector(thread.clone());
    }
    let ioctls = cpus.iter().map(|_| Arc::default()).collect();
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
        histograms: Arc::new(Room::new(AGGREGATION_BYTES)),
        ioctls,
        throttle_looked: Mutex::new(Instant::now()),
        life: Mutex::new(Life {
            live: false,
            kernel_replaced: false,
            ending: None,
        }),
        changed: Condvar::new(),
    });
    let cpus = cpus.into_iter().zip(clocks).collect();
    run(&machine, vm, cpus, producers, collector)?;
    Ok(machine)
}

fn create_cpu(
    host: &Kvm,
    vm: &VmFd,
    index: u32,
    config: &MachineConfig,
    entry: &Entry,
    mode: CatchMode,
) -> Result<CpuFd, BootError> {
    let fd = vm
        .create_vcpu(u64::from(index))
        .map_err(kvm("create a virtual CPU"))?;
    configure(&fd, host, index, config.cpus, entry)?;
    CpuFd::new(fd, mode).map_err(kvm("prepare a virtual CPU for debugging"))
}

/// Starts the threads of the machine.
fn run(
    machine: &Arc<Machine>,
    vm: Arc<VmFd>,
    cpus: Vec<(CpuFd, HostClock)>,
    producers: Vec<EventProducer>,
    collector: Collector,
) -> Result<(), BootError> {
    let (notices, inbox) = channel();
    let mut threads = Vec::with_capacity(cpus.len());
    for ((index, (cpu, clock)), events) in cpus.into_iter().enumerate().zip(producers) {
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let vcpu = Vcpu {
            index,
            cpu,
            catcher: Catcher::new(machine.mode, HitHandler::new(number, events), clock),
            shared: Arc::clone(&machine.shared),
            notices: notices.clone(),
            waited_since: None,
            ioctls: Arc::clone(&machine.ioctls[index]),
        };
        threads.push(spawn(machine, format!("vcpu{index}"), move || vcpu.run())?);
    }
    debug!("virtual CPUs started");
    let supervised = Arc::clone(machine);
    spawn(machine, "supervisor".to_owned(), move || {
        supervised.supervise(&inbox, threads, collector);
        // The VM is dropped after its vCPUs.
        drop(vm);
    })?;
    Ok(())
}

/// Starts a thread. If that fails, the threads started before are made to end.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_has_no_more_of_is_distinguished_from_what_it_cannot_do() {
        let read = |number| BootError::Initrd {
            path: "/initrd".into(),
            source: std::io::Error::from_raw_os_error(number),
        };
        let refused = |number| kvm("make a virtual machine")(kvm_ioctls::Error::new(number));
        for number in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN] {
            assert!(
                read(number).is_exhausted() && refused(number).is_exhausted(),
                "{number}"
            );
        }
        for number in [libc::ENOENT, libc::EACCES] {
            assert!(
                !read(number).is_exhausted() && !refused(number).is_exhausted(),
                "{number}"
            );
        }
        assert!(!BootError::NoCatchMode.is_exhausted());
    }
}
