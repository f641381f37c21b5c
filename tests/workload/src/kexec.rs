//! Leaves this kernel for another one.

use std::error::Error;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;

use libc::{c_int, c_ulong};

use crate::sys::checked;

/// `LINUX_REBOOT_CMD_KEXEC` (include/uapi/linux/reboot.h).
const REBOOT_KEXEC: c_int = 0x4558_4543;
/// `KEXEC_FILE_ON_CRASH` (include/uapi/linux/kexec.h).
const ON_CRASH: c_ulong = 2;

/// When to run the kernel that is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Now.
    Now,
    /// When this kernel panics.
    Crash,
}

/// Loads `kernel` and `initrd`, to be started with `cmdline`. Starts the kernel if `when` is [`When::Now`].
pub(crate) fn run(
    when: When,
    kernel: &str,
    initrd: &str,
    cmdline: &str,
) -> Result<(), Box<dyn Error>> {
    let (kernel, initrd) = (File::open(kernel)?, File::open(initrd)?);
    let cmdline = CString::new(cmdline)?;
    let flags = match when {
        When::Now => 0,
        When::Crash => ON_CRASH,
    };
    // SAFETY: two descriptors, and a string with its length, its NUL included.
    checked(unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            initrd.as_raw_fd(),
            cmdline.as_bytes_with_nul().len(),
            cmdline.as_ptr(),
            flags,
        )
    })?;
    if when == When::Now {
        // SAFETY: has no preconditions; nothing here is worth a sync.
        checked(unsafe { libc::reboot(REBOOT_KEXEC) })?;
    }
    Ok(())
}
