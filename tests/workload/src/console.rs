//! Much text for hvprobe's console, at once.
//!
//! The kernel's driver hands the serial port a byte at a time, and each is an exit or more; a string
//! instruction hands it a page.

use std::io::{self, IsTerminal as _, Write as _};

use crate::sys;

/// The data register of the serial port that is hvprobe's console.
const PORT: u16 = 0x3f8;

/// Prints `text`, behind everything that was printed before.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.flush()?;
    if !stdout.is_terminal() || sys::grant_port(PORT).is_err() {
        stdout.write_all(text.as_bytes())?;
        return stdout.flush();
    }
    sys::drain(&stdout)?;
    // As the terminal would.
    sys::write_port_string(PORT, text.replace('\n', "\r\n").as_bytes());
    Ok(())
}
