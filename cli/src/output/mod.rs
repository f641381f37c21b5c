//! Output of the program.
//!
//! Results go to standard output, everything else to standard error. Nothing here panics when a reader goes
//! away: a closed standard output is an error that ends the caller, and a closed standard error is ignored.

pub(crate) mod arguments;
pub(crate) mod asked;
mod bars;
mod bits;
pub(crate) mod captured;
pub(crate) mod events;
pub(crate) mod explained;
pub(crate) mod histogram;
pub(crate) mod histogram_key;
pub(crate) mod json;
pub(crate) mod lines;
mod maps;
pub(crate) mod names;
pub(crate) mod printf;
mod quoted;
mod registers;
pub(crate) mod remedy;
pub(crate) mod script_map;
pub(crate) mod skipped;
pub(crate) mod stack_trace;
pub(crate) mod summary;
pub(crate) mod table;
pub(crate) mod times;
mod value_json;
mod value_text;
mod valued;
pub(crate) mod values;
pub(crate) mod waiting;

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
    // Writing to a string does not fail. A message without a time would still be a message.
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

/// Returns `raw` as text without control characters for a terminal: each character that is not printable
/// becomes `?`.
pub(crate) fn harmless(raw: &[u8]) -> String {
    String::from_utf8_lossy(raw)
        .chars()
        .map(|c| match c {
            char::REPLACEMENT_CHARACTER => '?',
            c if c.is_control() => '?',
            c => c,
        })
        .collect()
}

/// Returns `raw` as text without control characters for a terminal, like [`harmless`]. In contrast to that, two
/// different inputs give different texts, as keys of histograms must. Each byte of a control character or of
/// invalid UTF-8 is written in octal, as `\001`, and backslashes are doubled.
pub(crate) fn escaped(raw: &[u8]) -> String {
    let mut text = String::with_capacity(raw.len());
    for chunk in raw.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                c if c.is_control() => escape(&mut text, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => text.push(c),
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

fn escape(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        text.push('\\');
        text.extend([6, 3, 0].map(|above| char::from(b'0' + (byte >> above & 7))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_and_broken_text_become_question_marks() {
        assert_eq!(harmless(b"ls"), "ls");
        assert_eq!(harmless(b"\x1b[2Jx\n"), "?[2Jx?");
        assert_eq!(harmless(b"a\xffb"), "a?b");
        assert_eq!(harmless("\u{9b}31m".as_bytes()), "?31m");
    }

    #[test]
    fn keys_of_counts_are_printed_by_their_bytes() {
        assert_eq!(escaped(b"ls"), "ls");
        assert_eq!(escaped(b"\x1b[2Jx\n"), "\\033[2Jx\\012");
        assert_eq!(escaped(b"a\xffb\xc3"), "a\\377b\\303");
        assert_eq!(escaped("\u{9b}31m".as_bytes()), "\\302\\23331m");
        assert_eq!(escaped("\\012 \u{fffd}?".as_bytes()), "\\\\012 \u{fffd}?");
    }

    #[test]
    fn texts_that_differ_look_different() {
        let mut seen = std::collections::BTreeMap::new();
        let bytes = 0..=u8::MAX;
        let pairs = bytes
            .clone()
            .flat_map(|one| bytes.clone().map(move |other| vec![one, other]));
        for raw in bytes.clone().map(|one| vec![one]).chain(pairs) {
            let text = escaped(&raw);
            assert!(!text.chars().any(char::is_control), "{raw:x?}");
            assert_eq!(seen.insert(text, raw.clone()), None, "{raw:x?}");
        }
    }
}
