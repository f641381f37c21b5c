//! Tells the host the guest's exit status.

use std::arch::asm;
use std::error::Error;
use std::io;

/// The port hvprobe takes the guest's exit status from. Stock cloud kernels have no `/dev/port`,
/// so a program has to write to it.
const PORT: u16 = 0xf4;

/// Writes `status` to the exit status port.
pub(crate) fn report(status: u8) -> Result<(), Box<dyn Error>> {
    // SAFETY: grants this process access to one port, of a device made for it.
    if unsafe { libc::ioperm(libc::c_ulong::from(PORT), 1, 1) } != 0 {
        return Err(format!(
            "no access to port {PORT:#x}: {}",
            io::Error::last_os_error()
        )
        .into());
    }
    // SAFETY: the port was granted above, and a byte written to it touches no memory.
    unsafe {
        asm!("out dx, al", in("dx") PORT, in("al") status, options(nomem, nostack, preserves_flags));
    }
    Ok(())
}
