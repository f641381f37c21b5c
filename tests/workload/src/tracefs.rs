//! Writes lines to files of the guest's tracefs (definitions of events, filters and triggers), and prints the
//! kernel's answers.
//!
//! Each line is judged as if it were alone: the effect of a line that the kernel accepted is undone before the next
//! line.

use std::error::Error;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::Path;

use crate::kprobe_event::TRACEFS;
use crate::{console, files};

const ERRORS: &str = "/sys/kernel/tracing/error_log";
/// Prefix of the written text in the error log.
const COMMAND: &str = "  Command: ";
/// Number of answers printed at a time.
const GROUP: usize = 50;

/// Takes each line of `file` as `FILE TEXT`, writes the text to that tracefs file, and prints the result:
/// `LINE ok`, `LINE absent` if there is no such file, `LINE ERRNO` or `LINE ERRNO COLUMN MESSAGE`. Lines and
/// columns count from 0.
pub(crate) fn run(file: &str) -> Result<(), Box<dyn Error>> {
    let mut answers = String::new();
    let lines = files::read(file)?;
    for (number, line) in lines.lines().enumerate() {
        let (name, text) = line
            .split_once(' ')
            .ok_or_else(|| format!("`{line}` is not `FILE TEXT`"))?;
        writeln!(answers, "{number} {}", answer(name, text)?)?;
        if number % GROUP == GROUP - 1 {
            console::print(&std::mem::take(&mut answers))?;
        }
    }
    console::print(&answers)?;
    println!("lines: {}", lines.lines().count());
    Ok(())
}

/// Writes `text` to the file `name`, and undoes it if the kernel accepted it. Returns the kernel's answer.
fn answer(name: &str, text: &str) -> Result<String, Box<dyn Error>> {
    let path = format!("{TRACEFS}/{name}");
    if !Path::new(&path).exists() {
        return Ok("absent".to_owned());
    }
    files::write(ERRORS, "\n")?;
    let mut file = OpenOptions::new()
        .append(true)
        .open(&path)
        .map_err(|error| files::named(&path, &error))?;
    let Err(error) = file.write_all(text.as_bytes()) else {
        drop(file);
        take_back(&path)?;
        return Ok("ok".to_owned());
    };
    let errno = error.raw_os_error().unwrap_or(0);
    let log = files::read(ERRORS)?;
    Ok(match last_error(&log, text) {
        Some((column, message)) => format!("{errno} {column} {message}"),
        None => errno.to_string(),
    })
}

/// Undoes the effect of a line that the kernel accepted, because it would affect the lines after it.
fn take_back(path: &str) -> io::Result<()> {
    if path.ends_with("/filter") {
        return files::write(path, "0");
    }
    if path.ends_with("/trigger") {
        // Opening the file with O_TRUNC removes all histograms.
        let opened = OpenOptions::new().write(true).truncate(true).open(path);
        return opened.map(drop).map_err(|error| files::named(path, &error));
    }
    files::write(path, "\n")
}

/// Returns the column and the message of the last entry of the log. The entry may show only the end of `text`, such
/// as the filter of a trigger.
fn last_error<'a>(log: &'a str, text: &str) -> Option<(usize, &'a str)> {
    let lines: Vec<&str> = log.lines().collect();
    let [message, command, caret] = *lines.get(lines.len().checked_sub(3)?..)? else {
        return None;
    };
    let (_, message) = message.split_once(": error: ")?;
    let column = caret.find('^')?.checked_sub(COMMAND.len())?;
    let command = command.strip_prefix(COMMAND)?;
    let before = text.strip_suffix(command).map_or(0, str::len);
    Some((before + column, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_is_that_of_the_definition() {
        let log = "[    1.000000] trace_kprobe: error: Invalid register name\n\
                   \x20 Command: p f %foo\n\
                   \x20              ^\n";
        let expected = Some((4, "Invalid register name"));
        assert_eq!(last_error(log, "p f %foo"), expected);
        assert_eq!(last_error(log, "p  f %foo"), expected);
        assert_eq!(last_error("# no errors\n", ""), None);
    }

    #[test]
    fn column_in_a_triggers_filter_is_that_in_the_trigger() {
        let log = "[    1.000000] event filter parse error: error: Field not found\n\
                   \x20 Command: no == 1\n\
                   \x20            ^\n";
        let expected = Some((17, "Field not found"));
        assert_eq!(last_error(log, "hist:keys=a if no == 1"), expected);
    }
}
