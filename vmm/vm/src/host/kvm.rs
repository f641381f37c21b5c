//! Opens KVM and checks its version and capabilities.

use kvm_ioctls::{Cap, Kvm};

use super::micro_guest::MicroGuestError;

/// Error of opening KVM or of checking the host.
#[derive(Debug, thiserror::Error)]
pub enum SelfCheckError {
    /// There is no KVM.
    #[error(
        "/dev/kvm does not exist: load the kvm_intel or kvm_amd module, enable virtualisation in the firmware, or give this machine nested virtualisation"
    )]
    Missing,
    /// `/dev/kvm` exists, but the user may not open it.
    #[error(
        "no permission to use /dev/kvm: add your user to the group that owns it (usually kvm) and log in again"
    )]
    Forbidden,
    /// Opening `/dev/kvm` failed for another reason.
    #[error("cannot open /dev/kvm")]
    Open(#[source] std::io::Error),
    /// The version of the KVM API is not 12, which has been the only version since 2007.
    #[error("/dev/kvm speaks API version {0}, not 12: this is no usable KVM")]
    Version(i32),
    /// A required capability is missing.
    #[error("this host's KVM lacks {0}; a newer kernel is needed")]
    Capability(&'static str),
    /// A check could not be made.
    #[error("cannot check this host")]
    Guest(#[from] MicroGuestError),
}

/// Opens KVM, and checks its API version and the required capabilities. An error says in one line what the user can
/// do.
///
/// # Errors
/// When `/dev/kvm` is missing, forbidden, or not a usable KVM.
pub fn open_kvm() -> Result<Kvm, SelfCheckError> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => SelfCheckError::Missing,
        libc::EACCES | libc::EPERM => SelfCheckError::Forbidden,
        _ => SelfCheckError::Open(error.into()),
    })?;
    match kvm.get_api_version() {
        API_VERSION => {}
        other => return Err(SelfCheckError::Version(other)),
    }
    for (capability, name) in NEEDED {
        if !kvm.check_extension(capability) {
            return Err(SelfCheckError::Capability(name));
        }
    }
    Ok(kvm)
}

/// KVM API, 4.1 `KVM_GET_API_VERSION`.
pub(super) const API_VERSION: i32 = 12;

/// Capabilities that machines require.
pub(super) const NEEDED: [(Cap, &str); 10] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::SyncRegs, "KVM_CAP_SYNC_REGS"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::SetGuestDebug, "KVM_CAP_SET_GUEST_DEBUG"),
];
