//! The terminal in raw mode, for a guest's console.
//!
//! However the program ends, by return, error, panic or a second Ctrl-C, the terminal is given its
//! settings back: by the guard's drop, or by [`restore`] where no drop runs.

use std::io::{self, IsTerminal as _};
use std::sync::Mutex;

use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcsetattr};

/// Settings to give back, while the terminal is raw.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Keeps standard input raw while it lives.
#[derive(Debug)]
pub(crate) struct Raw(());

impl Raw {
    /// Makes standard input raw; nothing to do where it is no terminal.
    ///
    /// Line feeds are still expanded on output, so that our own lines among the guest's begin at
    /// the left.
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

/// Gives the terminal its settings back, if it is raw.
pub(crate) fn restore() {
    if let Some(before) = saved().take() {
        // Nothing can be done about a terminal that is gone.
        let _gone = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}

fn saved() -> std::sync::MutexGuard<'static, Option<Termios>> {
    SAVED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
