//! What the lab says while it works: a spinner on a terminal, plain lines otherwise. All of it
//! goes to stderr; stdout belongs to the program that runs in the rig.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

/// Does one step of work under its name and, on a terminal, says how long it took.
pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    let spinner = spinner(name);
    let result = work();
    spinner.finish_and_clear();
    if result.is_ok() && stderr().is_terminal() {
        note(&format!(
            "{name} ({:.1} s)",
            started.elapsed().as_secs_f64()
        ));
    }
    result
}

/// A running spinner, or a line if stderr is not a terminal.
pub(crate) fn spinner(name: &str) -> ProgressBar {
    if !stderr().is_terminal() {
        note(name);
    }
    let spinner = ProgressBar::new_spinner().with_message(name.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed:.dim}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

/// One line about what the lab does or decided.
pub(crate) fn note(text: &str) {
    eprintln!("lab: {text}");
}
