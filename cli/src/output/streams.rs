//! Standard output for results, standard error for everything else.
//!
//! Nothing here panics when a reader goes away: a closed standard output is an error for the caller, which ends,
//! and a closed standard error is ignored.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};

/// Whether messages are JSON, like the log's.
static JSON: AtomicBool = AtomicBool::new(false);

/// Selects JSON or text for messages.
pub(crate) fn speak_json(json: bool) {
    JSON.store(json, Ordering::Relaxed);
}

/// Formats a message for standard error, with its line feed.
pub(crate) fn message_line(level: &str, message: fmt::Arguments<'_>) -> String {
    if !JSON.load(Ordering::Relaxed) {
        return format!("hvprobe: {message}\n");
    }
    let mut now = String::new();
    // Writing to a string does not fail, and without its time the message would still be useful.
    let _timed = SystemTime.format_time(&mut Writer::new(&mut now));
    let message = json!({
        "timestamp": now,
        "level": level,
        "fields": { "message": message.to_string() },
        "target": "hvprobe",
    });
    format!("{message}\n")
}

/// Prints a message on standard error.
pub(crate) fn notice(message: fmt::Arguments<'_>) {
    notice_at("INFO", message);
}

/// Prints an error message on standard error.
pub(crate) fn error(message: fmt::Arguments<'_>) {
    notice_at("ERROR", message);
}

fn notice_at(level: &str, message: fmt::Arguments<'_>) {
    // A closed standard error cannot be reported anywhere.
    let _closed = io::stderr().write_all(message_line(level, message).as_bytes());
}

/// Prints text on standard error unchanged.
pub(crate) fn eprint(text: fmt::Arguments<'_>) {
    // A closed standard error cannot be reported anywhere.
    let _closed = writeln!(io::stderr().lock(), "{text}");
}

/// Prints `text` and a line feed on standard output and flushes it.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}
