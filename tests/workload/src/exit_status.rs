//! Reports the guest's exit status to the host.

use std::error::Error;

use crate::sys;

/// The port from which hvprobe takes the guest's exit status. Stock cloud kernels have no `/dev/port`, so a
/// program has to write to it.
const PORT: u16 = 0xf4;

/// Writes `status` to the exit status port.
pub(crate) fn report(status: u8) -> Result<(), Box<dyn Error>> {
    sys::grant_port(PORT).map_err(|error| format!("no access to port {PORT:#x}: {error}"))?;
    sys::write_port(PORT, status);
    Ok(())
}
