//! What the guest's own kernel says of definitions of events.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{self, Write};

use crate::files;

const EVENTS: &str = "/sys/kernel/tracing/kprobe_events";
const ERRORS: &str = "/sys/kernel/tracing/error_log";
/// What comes before a definition in the log of errors.
const COMMAND: &str = "  Command: ";

/// Gives every line of `file` to the kernel, each as if it were alone, and prints what became of it:
/// `LINE ok`, `LINE ERRNO` or `LINE ERRNO COLUMN MESSAGE`, counted from 0.
pub(crate) fn run(file: &str) -> Result<(), Box<dyn Error>> {
    for (number, line) in files::read(file)?.lines().enumerate() {
        files::write(ERRORS, "\n")?;
        let mut events = OpenOptions::new()
            .append(true)
            .open(EVENTS)
            .map_err(|error| files::named(EVENTS, &error))?;
        match events.write_all(line.as_bytes()) {
            Ok(()) => {
                println!("{number} ok");
                // The event would be in the way of others.
                files::write(EVENTS, "\n")?;
            }
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                let log = files::read(ERRORS)?;
                match last_error(&log) {
                    Some((column, message)) => println!("{number} {errno} {column} {message}"),
                    None => println!("{number} {errno}"),
                }
            }
        }
        io::stdout().flush()?;
    }
    println!("definitions: {}", files::read(file)?.lines().count());
    Ok(())
}

/// The column and the message of the last entry of the log.
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
