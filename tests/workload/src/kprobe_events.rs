//! Collects the answers of the guest's own kernel to event definitions.

use std::error::Error;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;

use crate::{console, files};

const EVENTS: &str = "/sys/kernel/tracing/kprobe_events";
const ERRORS: &str = "/sys/kernel/tracing/error_log";
/// Precedes a definition in the error log.
const COMMAND: &str = "  Command: ";
/// Number of answers printed at a time.
const GROUP: usize = 50;

/// Gives each line of `file` to the kernel, as if it were alone, and prints the result: `LINE ok`, `LINE ERRNO`
/// or `LINE ERRNO COLUMN MESSAGE`. Lines are counted from 0.
pub(crate) fn run(file: &str) -> Result<(), Box<dyn Error>> {
    let mut answers = String::new();
    for (number, line) in files::read(file)?.lines().enumerate() {
        files::write(ERRORS, "\n")?;
        let mut events = OpenOptions::new()
            .append(true)
            .open(EVENTS)
            .map_err(|error| files::named(EVENTS, &error))?;
        match events.write_all(line.as_bytes()) {
            Ok(()) => {
                writeln!(answers, "{number} ok")?;
                // Otherwise this event could conflict with later ones.
                files::write(EVENTS, "\n")?;
            }
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                let log = files::read(ERRORS)?;
                match last_error(&log) {
                    Some((column, message)) => {
                        writeln!(answers, "{number} {errno} {column} {message}")?;
                    }
                    None => writeln!(answers, "{number} {errno}")?,
                }
            }
        }
        if number % GROUP == GROUP - 1 {
            console::print(&std::mem::take(&mut answers))?;
        }
    }
    console::print(&answers)?;
    println!("definitions: {}", files::read(file)?.lines().count());
    Ok(())
}

/// Returns the column and the message of the last entry in the log.
fn last_error(log: &str) -> Option<(usize, &str)> {
    let lines: Vec<&str> = log.lines().collect();
    let [message, _, caret] = *lines.get(lines.len().checked_sub(3)?..)? else {
        return None;
    };
    let (_, message) = message.split_once(": error: ")?;
    Some((caret.find('^')?.checked_sub(COMMAND.len())?, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_is_that_of_the_definition() {
        let log = "[    1.000000] trace_kprobe: error: Invalid register name\n\
                   \x20 Command: p f %foo\n\
                   \x20              ^\n";
        assert_eq!(last_error(log), Some((4, "Invalid register name")));
        assert_eq!(last_error("# no errors\n"), None);
    }
}
