//! Progress of a boot: a spinner on a terminal, lines in a file.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Operation that takes a while.
#[derive(Debug)]
pub(crate) struct Progress {
    spinner: Option<ProgressBar>,
}

impl Progress {
    /// Reports that `what` has begun. If `plain` is set, there is no spinner.
    pub(crate) fn begin(what: String, plain: bool) -> Self {
        if plain || !io::stderr().is_terminal() {
            output::notice(format_args!("{what}"));
            return Self { spinner: None };
        }
        let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            spinner.set_style(style);
        }
        spinner.set_message(what);
        spinner.enable_steady_tick(Duration::from_millis(100));
        Self {
            spinner: Some(spinner),
        }
    }

    /// Prints a message during the operation.
    pub(crate) fn print(&self, message: &str) {
        let print = || output::notice(format_args!("{message}"));
        match &self.spinner {
            Some(spinner) => spinner.suspend(print),
            None => print(),
        }
    }

    /// Ends the operation and prints the message `how`.
    pub(crate) fn done(self, how: &str) {
        drop(self);
        output::notice(format_args!("{how}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}
