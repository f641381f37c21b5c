//! The log, on standard error.
//!
//! Invariants: a thread that logs never waits for the reader of standard error. The number of waiting lines and the
//! length of each are bounded. Lines beyond that are lost, and their number is reported as soon as something reads
//! again. Panics are logged like other messages.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::borrow::Cow;
use std::env;
use std::ffi::OsStr;
use std::io::{self, IsTerminal as _, Write};
use std::panic;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use tracing::{Level, error};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::time::uptime;

use crate::options::log::{LogArgs, LogFormat};
use crate::output;

/// Environment variable with the log filter.
const VARIABLE: &str = "RUST_LOG";
/// Environment variable that disables colours (<https://no-color.org>).
const PLAIN: &str = "NO_COLOR";
/// Maximum length of a line in bytes. With it the default number of waiting lines takes at most 64 MiB.
const LINE: usize = 8 << 10;
/// Number of bytes that are shown of a longer line.
const SHOWN: usize = 1 << 10;
/// Maximum time for writing the last lines at the end of the program.
const FAREWELL: Duration = Duration::from_secs(1);

/// Returns whether lines for people are coloured: only on a terminal, and not if `plain`, the value of [`PLAIN`],
/// is set and not empty.
fn in_colours(terminal: bool, plain: Option<&OsStr>) -> bool {
    terminal && plain.is_none_or(OsStr::is_empty)
}

/// The running log.
#[derive(Debug)]
pub(crate) struct Log {
    worker: WorkerGuard,
    losses: Arc<Losses>,
}

impl Log {
    /// Starts the log. It contains warnings, or the messages that `RUST_LOG` selects. Each `-v` adds more of
    /// hvprobe's own messages; `-v` overrides `RUST_LOG`.
    pub(crate) fn start(args: LogArgs) -> Self {
        let LogArgs {
            verbose,
            log_format: format,
            log_lines: lines,
        } = args;
        output::speak_json(format == LogFormat::Json);
        let losses = Arc::<Losses>::default();
        let stderr = Stderr(Arc::clone(&losses));
        let (writer, worker) = NonBlockingBuilder::default()
            .lossy(true)
            .buffered_lines_limit(usize::try_from(lines).unwrap_or(usize::MAX))
            .thread_name("log")
            .finish(stderr);
        // Fails only if the counter is already set, but it is set only here.
        let _ = losses.counter.set(writer.error_counter());
        let (filter, mistake) = filter(verbose, env::var(VARIABLE).ok().as_deref());
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(move || Lines(writer.clone()))
            .log_internal_errors(false);
        match format {
            LogFormat::Text => {
                let colours = in_colours(io::stderr().is_terminal(), env::var_os(PLAIN).as_deref());
                let log = log.with_ansi(colours);
                log.with_target(false).with_timer(uptime()).init();
            }
            LogFormat::Json => log.json().init(),
        }
        if let Some(mistake) = mistake {
            output::notice(format_args!("{VARIABLE} is left aside: {mistake}"));
        }
        log_panics();
        Self { worker, losses }
    }

    /// Writes the remaining lines, unless nothing reads them.
    pub(crate) fn finish(self) {
        if self.losses.are_reported_within(FAREWELL) {
            drop(self.worker);
        } else {
            // The guard's drop would print a complaint on standard output, between results.
            std::mem::forget(self.worker);
        }
    }
}

/// Returns the log filter, and the mistake in the variable's value if it was used and is invalid.
fn filter(verbose: u8, variable: Option<&str>) -> (EnvFilter, Option<String>) {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let ours = || EnvFilter::new(format!("warn,hvprobe={level}"));
    match variable {
        Some(wanted) if verbose == 0 && !wanted.is_empty() => match EnvFilter::try_new(wanted) {
            Ok(filter) => (filter, None),
            Err(error) => (ours(), Some(error.to_string())),
        },
        _ => (ours(), None),
    }
}

/// Sends panics to the log, because printing them could block on the reader of standard error.
fn log_panics() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !tracing::enabled!(Level::ERROR) {
            return print(info);
        }
        let thread = thread::current();
        let name = thread.name().unwrap_or("without a name");
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            error!("thread {name} {info}\n{backtrace}");
        } else {
            error!("thread {name} {info}");
        }
    }));
}

/// Returns the line to log: `whole` or, if that is too long, a message with its length and its beginning.
fn line(whole: &[u8]) -> Cow<'_, [u8]> {
    if whole.len() <= LINE {
        return whole.into();
    }
    let begins = whole.get(..SHOWN).unwrap_or(whole);
    let message = output::message_line(
        "WARN",
        format_args!(
            "a line of the log has {} bytes, and begins: {}",
            whole.len(),
            output::harmless(begins)
        ),
    );
    message.into_bytes().into()
}

/// Writer for log lines.
#[derive(Debug)]
struct Lines(NonBlocking);

impl Write for Lines {
    fn write(&mut self, whole: &[u8]) -> io::Result<usize> {
        // The queue takes the data of one call as one entry of any length.
        self.0.write_all(&line(whole))?;
        Ok(whole.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Counter of lost lines.
#[derive(Debug, Default)]
struct Losses {
    counter: OnceLock<ErrorCounter>,
    reported: Mutex<usize>,
    changed: Condvar,
}

impl Losses {
    fn count(&self) -> usize {
        self.counter.get().map_or(0, ErrorCounter::dropped_lines)
    }

    /// Calls `print` with the number of lost lines that it has not reported yet, if there are any.
    fn report(&self, print: impl FnOnce(usize) -> io::Result<()>) -> io::Result<()> {
        let lost = self.count();
        let reported = *self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if lost > reported {
            print(lost - reported)?;
            *self.reported.lock().unwrap_or_else(PoisonError::into_inner) = lost;
            self.changed.notify_all();
        }
        Ok(())
    }

    fn are_reported_within(&self, patience: Duration) -> bool {
        let reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(reported, patience, |reported| *reported < self.count());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// Standard error as the log's thread writes to it.
#[derive(Debug)]
struct Stderr(Arc<Losses>);

impl Stderr {
    fn report_losses(&self) -> io::Result<()> {
        self.0.report(|lost| {
            let text = output::message_line(
                "WARN",
                format_args!(
                    "{lost} lines of the log were lost: standard error is read too slowly"
                ),
            );
            io::stderr().write_all(text.as_bytes())
        })
    }
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.report_losses()?;
        io::stderr().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        // The log's thread calls this when no lines wait any more.
        self.report_losses()?;
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(verbose: u8, variable: Option<&str>) -> (String, bool) {
        let (filter, mistake) = filter(verbose, variable);
        let mut words: Vec<_> = filter.to_string().split(',').map(str::to_owned).collect();
        words.sort();
        (words.join(","), mistake.is_some())
    }

    #[test]
    fn what_was_typed_counts_more_than_the_environment() {
        let ours = |level: &str| format!("hvprobe={level},warn");
        assert_eq!(shown(0, None), (ours("warn"), false));
        assert_eq!(shown(0, Some("")), (ours("warn"), false));
        assert_eq!(shown(0, Some("h2=debug")), ("h2=debug".into(), false));
        assert_eq!(shown(1, Some("h2=debug")), (ours("info"), false));
        assert_eq!(shown(9, None), (ours("trace"), false));
        assert_eq!(shown(0, Some("a=b=c")), (ours("warn"), true));
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_to_its_beginning() {
        let whole = [b'x'; LINE];
        assert_eq!(*line(&whole), whole);
        let long = format!("begins\x1b\n{}", "ä".repeat(LINE));
        let cut = String::from_utf8(line(long.as_bytes()).into_owned()).unwrap();
        assert!(cut.len() < LINE && cut.ends_with('\n'), "{cut}");
        let beginning = format!("has {} bytes, and begins: begins??ä", long.len());
        assert!(cut.contains(&beginning), "{cut}");
        assert_eq!(cut.lines().count(), 1);
    }

    #[test]
    fn colours_are_for_terminals_and_for_those_who_want_them() {
        assert!(in_colours(true, None));
        assert!(in_colours(true, Some(OsStr::new(""))));
        assert!(!in_colours(true, Some(OsStr::new("1"))));
        assert!(!in_colours(false, None));
    }
}
