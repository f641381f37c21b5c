//! Prints much text on hvprobe's console quickly.
//!
//! The kernel's driver writes to the serial port byte by byte, and each byte takes an exit or more. A string
//! instruction writes a page at once.

use std::io::{self, IsTerminal as _, Write as _};

use crate::sys;

/// The data register of the serial port that is hvprobe's console.
const PORT: u16 = 0x3f8;

/// Prints `text` after everything that was printed before.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.flush()?;
    if !stdout.is_terminal() || sys::grant_port(PORT).is_err() {
        stdout.write_all(text.as_bytes())?;
        return stdout.flush();
    }
    sys::drain(&stdout)?;
    // Line ends as the terminal writes them.
    sys::write_port_string(PORT, text.replace('\n', "\r\n").as_bytes());
    Ok(())
}
