//! How a boot gets on: a spinner where a person watches, lines where a file does.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Something that takes a while.
#[derive(Debug)]
pub(crate) struct Progress {
    spinner: Option<ProgressBar>,
}

impl Progress {
    /// Says that `what` has begun. With `plain`, nothing moves on the screen.
    pub(crate) fn begin(what: String, plain: bool) -> Self {
        if plain || !io::stderr().is_terminal() {
            output::tell(format_args!("{what}"));
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

    /// Prints a message while it goes on.
    pub(crate) fn tell(&self, message: &str) {
        let tell = || output::tell(format_args!("{message}"));
        match &self.spinner {
            Some(spinner) => spinner.suspend(tell),
            None => tell(),
        }
    }

    /// Says that it is done, in other words.
    pub(crate) fn done(self, how: &str) {
        drop(self);
        output::tell(format_args!("{how}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}
