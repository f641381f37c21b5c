//! The hardware of a machine, assembled step by step.
//!
//! ```text
//!   memory ──► VM and devices ──► ACPI tables ──► kernel, initramfs and command line ──► vCPUs
//! ```
//! Invariants: each step takes a value that the step before it returns, so no step can be left out or come too
//! early. No vCPU runs yet.

use std::sync::Arc;

use hvprobe_arch::Gpa;
use hvprobe_devices::{COM1_GSI, ClaimError, Devices};
use hvprobe_engine::HiddenRegion;
use hvprobe_vm::host;
use hvprobe_vm::loader;
use hvprobe_vm::memory::GuestRam;
use hvprobe_vm::vcpu::{CpuFd, configure};
use hvprobe_vm::{ACPI_TABLES, CatchMode, Entry, check_count, create_vm, pulse};
use kvm_ioctls::{Kvm, VmFd};

use super::error::{BootError, kvm};
use super::files::Files;
use crate::config::{DEFAULT_CMDLINE, MachineConfig};
use crate::console::ConsoleOutput;

/// Allocates the guest's RAM, and the hidden region of the engine beside it.
pub(super) fn memory(config: &MachineConfig) -> Result<GuestRam, BootError> {
    Ok(GuestRam::with_hidden(
        config.memory,
        HiddenRegion::FULL_SIZE,
    )?)
}

/// A virtual machine with memory and devices.
pub(super) struct Board {
    host: Kvm,
    pub(super) vm: Arc<VmFd>,
    pub(super) ram: GuestRam,
    pub(super) devices: Devices,
    /// Output of the serial port.
    pub(super) console: Arc<ConsoleOutput>,
    cpus: u32,
}

/// The ACPI tables in the guest's memory.
pub(super) struct Firmware {
    rsdp: Gpa,
}

impl Board {
    /// Creates the virtual machine with its devices, and registers `ram`.
    pub(super) fn new(config: &MachineConfig, ram: GuestRam) -> Result<Self, BootError> {
        let host = host::open_kvm()?;
        check_count(&host, config.cpus)?;
        let vm = Arc::new(create_vm(&host)?);
        ram.register(&vm)?;
        let console = Arc::new(ConsoleOutput::new(config.bounds.console));
        let devices = devices(&vm, &console)?;
        Ok(Self {
            host,
            vm,
            ram,
            devices,
            console,
            cpus: config.cpus,
        })
    }

    /// Writes the tables in which the guest finds its processors and devices.
    pub(super) fn write_firmware(&self) -> Result<Firmware, BootError> {
        let rsdp = self.devices.write_acpi(&self.ram, ACPI_TABLES, self.cpus)?;
        Ok(Firmware { rsdp })
    }

    /// Loads the kernel, its initramfs and its command line: [`DEFAULT_CMDLINE`] if `cmdline` is empty.
    pub(super) fn load(
        &self,
        files: Files,
        cmdline: &str,
        firmware: &Firmware,
    ) -> Result<Entry, BootError> {
        let cmdline = match cmdline.trim() {
            "" => DEFAULT_CMDLINE,
            given => given,
        };
        let initrd: Vec<&[u8]> = files.initrd.iter().map(Vec::as_slice).collect();
        let kernel = files.kernel.kernel();
        let entry = loader::load(kernel, &self.ram, &initrd, cmdline, firmware.rsdp)?;
        Ok(entry)
    }

    /// Creates the vCPUs, which will start at `entry` and catch int3s in `mode`.
    pub(super) fn create_cpus(
        &self,
        entry: &Entry,
        mode: CatchMode,
    ) -> Result<Vec<CpuFd>, BootError> {
        let create = |index| {
            let fd = self
                .vm
                .create_vcpu(u64::from(index))
                .map_err(kvm("create a virtual CPU"))?;
            configure(&fd, &self.host, index, self.cpus, entry)?;
            CpuFd::new(fd, mode).map_err(kvm("prepare a virtual CPU for debugging"))
        };
        (0..self.cpus).map(create).collect()
    }
}

/// Creates the devices of `vm`, whose serial port prints to `console`. The devices refer to the VM weakly.
fn devices(vm: &Arc<VmFd>, console: &Arc<ConsoleOutput>) -> Result<Devices, ClaimError> {
    let lines = Arc::downgrade(vm);
    let interrupt = move || {
        let vm = lines.upgrade();
        vm.map_or(Ok(()), |vm| pulse(&vm, COM1_GSI))
    };
    Devices::new(interrupt, Arc::clone(console) as _)
}
