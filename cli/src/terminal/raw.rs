//! Raw mode of the terminal, for a guest's console.
//!
//! The terminal's settings are restored whether the program ends by return, error, panic or a second Ctrl-C: by the
//! drop of the guard or, where no drop runs, by [`restore`].

use std::io::{self, IsTerminal as _};
use std::sync::Mutex;

use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcsetattr};

/// Settings to restore; `Some` while the terminal is raw.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Guard that keeps standard input in raw mode.
#[derive(Debug)]
pub(crate) struct Raw(());

impl Raw {
    /// Makes standard input raw; returns `None` if it is no terminal.
    ///
    /// Line feeds are still expanded on output, so that hvprobe's own lines between the guest's begin at the
    /// left.
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        let input = io::stdin();
        if !input.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&input)?;
        let mut raw = before.clone();
        raw.make_raw();
        raw.output_modes |= before.output_modes & (OutputModes::OPOST | OutputModes::ONLCR);
        *saved() = Some(before);
        tcsetattr(&input, OptionalActions::Now, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the settings of the terminal if it is raw. Discards input that was not read: it was meant for the guest,
/// and would otherwise be read by the user's shell.
pub(crate) fn restore() {
    if let Some(before) = saved().take() {
        // A terminal that is gone cannot be restored.
        let _gone = tcsetattr(io::stdin(), OptionalActions::Flush, &before);
    }
}

fn saved() -> std::sync::MutexGuard<'static, Option<Termios>> {
    SAVED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
