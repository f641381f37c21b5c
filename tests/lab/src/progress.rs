//! Progress of the lab's work: a spinner on a terminal, else a line at the start and one every few seconds. All of
//! it goes to stderr. The output of the program that runs in the rig goes to stdout.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

/// Maximum time without a line while the lab waits for something.
pub(crate) const EVERY: Duration = Duration::from_secs(5);

/// Does one step of work, and shows its name meanwhile. On a terminal, prints how long the step took if it
/// succeeded.
pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    let waiting = Waiting::start(name);
    let result = work();
    waiting.finish();
    if result.is_ok() && stderr().is_terminal() {
        note(&format!(
            "{name} ({:.1} s)",
            started.elapsed().as_secs_f64()
        ));
    }
    result
}

/// Shows that the lab waits for something, until it is finished or dropped.
#[derive(Clone, Debug)]
pub(crate) struct Waiting(Arc<Shown>);

#[derive(Debug)]
enum Shown {
    Spinner(ProgressBar),
    /// Dropping the sender ends the thread that prints lines.
    Lines(Mutex<Option<Sender<()>>>),
}

impl Waiting {
    /// Shows that the lab waits for `name`.
    pub(crate) fn start(name: &str) -> Self {
        if !stderr().is_terminal() {
            return Self::with_lines(name);
        }
        let spinner = ProgressBar::new_spinner().with_message(name.to_owned());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed:.dim}") {
            spinner.set_style(style);
        }
        spinner.enable_steady_tick(Duration::from_millis(100));
        Self(Arc::new(Shown::Spinner(spinner)))
    }

    fn with_lines(name: &str) -> Self {
        note(name);
        let (finish, finished) = channel();
        let (name, since) = (name.to_owned(), Instant::now());
        thread::spawn(move || {
            while finished.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                note(&format!("{name}: {} s", since.elapsed().as_secs()));
            }
        });
        Self(Arc::new(Shown::Lines(Mutex::new(Some(finish)))))
    }

    /// Ends the wait. From then on nothing is shown.
    pub(crate) fn finish(&self) {
        match &*self.0 {
            Shown::Spinner(spinner) => spinner.finish_and_clear(),
            Shown::Lines(finish) => {
                *finish.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
    }
}

/// Writes `bytes`, which a program printed, to stdout without delay.
pub(crate) fn pass_on(bytes: &[u8]) -> Result<()> {
    let mut stdout = stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .context("cannot write to stdout")
}

/// Prints one line about what the lab does or has decided.
pub(crate) fn note(text: &str) {
    eprintln!("lab: {text}");
}
