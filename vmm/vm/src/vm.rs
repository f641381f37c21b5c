//! Creates KVM virtual machines with interrupt controllers and timer, but without memory and vCPUs.

use std::io;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Kvm, VmFd};

/// Maximum number of vCPUs of a machine. An APIC id has 8 bits, and the id 255 addresses all processors. More vCPUs
/// would need interrupt remapping, which guests of this machine do not have.
pub(crate) const MAX_CPUS: u32 = 254;

/// Addresses of what VMX needs to run guests in real mode: the task state segment (three pages) and, one page
/// before it, the identity page table (KVM API, `KVM_SET_TSS_ADDR`, `KVM_SET_IDENTITY_MAP_ADDR`).
const TSS: usize = 0xfffb_d000;
const IDENTITY_MAP: u64 = 0xfffb_c000;

/// Error of setting up a machine or one of its vCPUs.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The number of vCPUs is out of range.
    #[error("{asked} vCPUs are impossible: this host allows 1 to {max}")]
    Count {
        /// The number asked for.
        asked: u32,
        /// The largest possible number.
        max: u32,
    },
    /// KVM refused a step of the setup.
    #[error("kvm failed to {what}")]
    Kvm {
        /// The step.
        what: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// KVM refused one model-specific register.
    #[error("kvm refused to set MSR {index:#x}")]
    Msr {
        /// The register's number.
        index: u32,
    },
}

pub(crate) fn kvm_error(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> CpuError {
    move |source| CpuError::Kvm { what, source }
}

/// Checks that `kvm` and the guest's interrupt controllers support `count` vCPUs.
///
/// # Errors
/// When `count` is zero or too large.
pub fn check_count(kvm: &Kvm, count: u32) -> Result<(), CpuError> {
    let max = u32::try_from(kvm.get_max_vcpus()).unwrap_or(MAX_CPUS);
    let max = max.min(MAX_CPUS);
    if (1..=max).contains(&count) {
        Ok(())
    } else {
        Err(CpuError::Count { asked: count, max })
    }
}

/// Creates a virtual machine with interrupt controllers and timer, but no memory and no vCPUs yet.
///
/// # Errors
/// When KVM refuses.
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, CpuError> {
    let vm = kvm
        .create_vm()
        .map_err(kvm_error("create a virtual machine"))?;
    vm.set_identity_map_address(IDENTITY_MAP)
        .map_err(kvm_error("set the identity map address"))?;
    vm.set_tss_address(TSS)
        .map_err(kvm_error("set the TSS address"))?;
    vm.create_irq_chip()
        .map_err(kvm_error("create the interrupt controllers"))?;
    let pit = kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit).map_err(kvm_error("create the timer"))?;
    Ok(vm)
}

/// Raises an interrupt line of `vm` and lowers it (KVM API, 4.25 KVM_IRQ_LINE).
///
/// # Errors
/// When KVM refuses.
pub fn pulse(vm: &VmFd, line: u32) -> io::Result<()> {
    vm.set_irq_line(line, true)?;
    Ok(vm.set_irq_line(line, false)?)
}
