//! Lines that write into `kprobe_events` or into an event's file in tracefs.
//!
//! ```text
//! written = FILE ":" TEXT                                   (as `grep` prints it)
//!         | "echo" blanks quoted [blanks] (">" | ">>") [blanks] FILE    (as a shell does it)
//! quoted  = "'" TEXT "'" | '"' TEXT '"' | TEXT
//! FILE    = [FOLDER] ("kprobe_events" | "events/" GROUP "/" EVENT ("/filter" | "/trigger"))
//! FOLDER  = "/sys/kernel/tracing/" | "/sys/kernel/debug/tracing/"
//! ```
//!
//! Invariant: TEXT is exactly what a shell would write. A line that a shell would expand to something else is
//! refused.

use crate::cursor::unprintable;
use crate::parse_error::{ParseError, error};

/// Folders at which tracefs is mounted.
const FOLDERS: [&str; 2] = ["/sys/kernel/tracing/", "/sys/kernel/debug/tracing/"];
/// Folder of the events' files in tracefs.
const EVENTS: &str = "events/";

/// Text, and the file that it is written into.
#[derive(Debug)]
pub(super) struct Written<'a> {
    /// The file.
    pub(super) to: To<'a>,
    /// Column of [`text`](Self::text).
    pub(super) column: usize,
    /// Text to write.
    pub(super) text: &'a str,
}

/// File of tracefs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To<'a> {
    /// `kprobe_events`.
    Definitions,
    /// Filter of an event.
    Filter(Event<'a>),
    /// Triggers of an event.
    Trigger(Event<'a>),
}

/// `GROUP/EVENT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event<'a> {
    /// Column of the path.
    pub(super) column: usize,
    /// Group and event.
    pub(super) path: &'a str,
}

/// Returns whether `line` is a command that writes into a file, rather than a definition.
pub(super) fn is_written(line: &str) -> bool {
    let line = line.trim_start();
    let echo = line.strip_prefix("echo");
    line.starts_with(EVENTS)
        || line.starts_with('/')
        || echo.is_some_and(|rest| rest.starts_with([' ', '\t']))
}

/// Parses a line that [`is_written`] accepts.
pub(super) fn read(line: &str) -> Result<Written<'_>, ParseError> {
    if let Some((column, c)) = unprintable(line) {
        return error(
            column,
            format!("{c:?}: what is written is one line of ASCII"),
        );
    }
    let at = line.len() - line.trim_start().len();
    match line[at..].strip_prefix("echo") {
        Some(_) => read_echo(line, at + "echo".len()),
        None => read_grep(line, at),
    }
}

/// Parses `FILE:TEXT` from `at` on.
fn read_grep(line: &str, at: usize) -> Result<Written<'_>, ParseError> {
    let line = uncommented(line, at);
    let Some(colon) = line[at..].find(':') else {
        return error(line.len(), "`:` and what is written there belong here");
    };
    let to = read_file(at, &line[at..at + colon])?;
    let (column, text) = trimmed(line, at + colon + 1, line.len());
    Ok(Written { to, column, text })
}

/// Parses the part of `line` after `echo`, which begins at `at`.
fn read_echo(line: &str, at: usize) -> Result<Written<'_>, ParseError> {
    let at = line.len() - line[at..].trim_start().len();
    let quote = line[at..].chars().next();
    let (column, text, behind) = match quote.filter(|c| matches!(c, '\'' | '"')) {
        Some(quote) => {
            let from = at + 1;
            let Some(length) = line[from..].find(quote) else {
                return error(line.len(), format!("String is not closed with `{quote}`"));
            };
            let text = &line[from..from + length];
            let expands = |c| matches!(c, '$' | '`' | '\\');
            if let (Some(strange), '"') = (text.find(expands), quote) {
                let message = "a shell makes something else of this; write ' instead of \"";
                return error(from + strange, message);
            }
            (from, text, from + length + 1)
        }
        None => {
            let line = uncommented(line, at);
            let end = line[at..].find('>').map_or(line.len(), |end| at + end);
            let (from, text) = trimmed(line, at, end);
            let plain = |c: char| c.is_ascii_alphanumeric() || " \t_:=,.+-@%/!".contains(c);
            if let Some(strange) = text.find(|c| !plain(c)) {
                let message = "a shell makes something else of this; put it all in '...'";
                return error(from + strange, message);
            }
            (from, text, end)
        }
    };
    let line = uncommented(line, behind);
    let (at, rest) = trimmed(line, behind, line.len());
    let Some(file) = rest.strip_prefix(">>").or_else(|| rest.strip_prefix('>')) else {
        return error(at, "`> FILE` or `>> FILE` belongs here");
    };
    let (at, file) = trimmed(line, line.len() - file.len(), line.len());
    let to = read_file(at, file)?;
    Ok(Written { to, column, text })
}

/// Returns `line` without the comment that begins with the first `#` at or after `from`.
fn uncommented(line: &str, from: usize) -> &str {
    line[from..]
        .find('#')
        .map_or(line, |length| &line[..from + length])
}

/// Returns the text of `line[from..to]` without the blanks around it, and the column at which it begins.
fn trimmed(line: &str, from: usize, to: usize) -> (usize, &str) {
    let text = line[from..to].trim_end();
    let inner = text.trim_start();
    (from + text.len() - inner.len(), inner)
}

/// Parses the file `name`, which begins at `column`.
fn read_file(column: usize, name: &str) -> Result<To<'_>, ParseError> {
    let folder = FOLDERS.iter().find(|folder| name.starts_with(**folder));
    let at = folder.map_or(0, |folder| folder.len());
    let inner = &name[at..];
    if inner == "kprobe_events" {
        return Ok(To::Definitions);
    }
    let parts: Vec<_> = inner.split('/').collect();
    let [_, group, event, file] = parts[..] else {
        return error(column, NO_FILE);
    };
    if !inner.starts_with(EVENTS) || group.is_empty() || event.is_empty() {
        return error(column, NO_FILE);
    }
    let start = at + EVENTS.len();
    let end = start + group.len() + 1 + event.len();
    let event = Event {
        column: column + start,
        path: &name[start..end],
    };
    match file {
        "filter" => Ok(To::Filter(event)),
        "trigger" => Ok(To::Trigger(event)),
        "enable" => error(column + end + 1, "probes are enabled; leave this line out"),
        _ => error(column + end + 1, NO_FILE),
    }
}

const NO_FILE: &str = "No such file or directory; there are kprobe_events, events/GROUP/EVENT/filter \
                       and events/GROUP/EVENT/trigger";
