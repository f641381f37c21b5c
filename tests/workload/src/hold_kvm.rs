//! Keeps KVM's static keys unchanged while other machines come and go.
//!
//! KVM patches its own text when the first virtual machine is created and when the last one is destroyed. It does
//! the same for virtual CPUs without a local APIC, and for virtual CPUs whose APIC is disabled. QEMU's TCG with
//! several host threads sometimes continues to execute the int3 of such a patch after it is gone (seen with 7.2),
//! and the emulated machine hangs. Two machines that stay until the end, one with and one without an interrupt
//! controller of KVM's, keep the numbers of all three above zero.

use std::error::Error;
use std::ffi::{CStr, c_int, c_ulong};
use std::io;

use crate::sys::checked;

const KVM_CREATE_VM: c_ulong = 0xae01;
const KVM_CREATE_VCPU: c_ulong = 0xae41;
const KVM_CREATE_IRQCHIP: c_ulong = 0xae60;
const DEVICE: &CStr = c"/dev/kvm";

/// Creates the machines, and leaves them to a process in the background.
pub(crate) fn hold() -> Result<(), Box<dyn Error>> {
    // SAFETY: a constant path with its NUL; the descriptor is meant to stay open.
    let kvm = unsafe { libc::open(DEVICE.as_ptr(), libc::O_RDWR) };
    checked(kvm)?;
    for irqchip in [false, true] {
        let vm = ask(kvm, KVM_CREATE_VM)?;
        if irqchip {
            ask(vm, KVM_CREATE_IRQCHIP)?;
        }
        ask(vm, KVM_CREATE_VCPU)?;
    }
    // SAFETY: this process has one thread, and the child only waits.
    match checked(unsafe { libc::fork() })? {
        0 => loop {
            // SAFETY: has no preconditions.
            unsafe { libc::pause() };
        },
        _ => Ok(()),
    }
}

/// Makes a request whose argument is zero. Returns its result, which is a new descriptor.
fn ask(fd: c_int, request: c_ulong) -> io::Result<c_int> {
    // SAFETY: the requests used here take an integer and touch no memory of ours.
    checked(unsafe { libc::ioctl(fd, request, 0) })
}
