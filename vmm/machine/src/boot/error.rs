//! The error of a boot.

use std::error::Error;
use std::path::PathBuf;

use hvprobe_devices::{AcpiError, ClaimError};
use hvprobe_engine::RegisterError;
use hvprobe_linux::image::ImageError;
use hvprobe_vm::CpuError;
use hvprobe_vm::host::SelfCheckError;
use hvprobe_vm::loader::LoadError;
use hvprobe_vm::memory::MemoryError;

use crate::tripwire::NoTripwire;

/// Error of booting a machine. Nothing of the machine is left behind.
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
    /// The host runs guests, but there is no way to catch int3s in them.
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
    /// Returns whether the boot failed because the host ran out of descriptors, processes or memory, which is
    /// temporary (errno(3)).
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

/// Returns a function that converts KVM's error at the request `what`.
pub(super) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> BootError {
    move |source| BootError::Kvm { what, source }
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
