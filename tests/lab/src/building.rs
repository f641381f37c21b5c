//! Progress of a build: a line every few seconds where there is no terminal.
//!
//! Without a terminal, cargo draws its bar only if it is asked to. Each update of the bar is then a piece of text
//! that ends with a carriage return, and the lab makes its lines from these pieces. It leaves out cargo's lines
//! about single crates, and passes on cargo's diagnostics unchanged.

use std::io::{self, BufRead, BufReader, Read, Write, stderr};
use std::process::Command;
use std::time::Instant;

use crate::progress::{EVERY, note};

/// Makes cargo draw its bar without a terminal.
pub(crate) fn ask_for_bar(command: &mut Command) {
    command
        .env("CARGO_TERM_PROGRESS_WHEN", "always")
        .env("CARGO_TERM_PROGRESS_WIDTH", "200")
        .env("CARGO_TERM_COLOR", "never");
}

/// Reads cargo's output from `from` to its end: prints progress, and passes on diagnostics.
pub(crate) fn follow(from: impl Read) -> io::Result<()> {
    let mut pieces = Pieces(BufReader::new(from));
    let mut said = Instant::now();
    while let Some(piece) = pieces.next()? {
        match Said::read(&piece) {
            Said::Progress(what) if said.elapsed() >= EVERY => {
                note(&what);
                said = Instant::now();
            }
            Said::Progress(_) | Said::Step => {}
            Said::Waits => note("waiting for another cargo to end its build"),
            Said::Other => stderr().lock().write_all(format!("{piece}\n").as_bytes())?,
        }
    }
    Ok(())
}

/// Reader of pieces of text, each of which ends at a newline or carriage return.
struct Pieces<R>(BufReader<R>);

impl<R: Read> Pieces<R> {
    fn next(&mut self) -> io::Result<Option<String>> {
        let mut piece = Vec::new();
        loop {
            let there = self.0.fill_buf()?;
            if there.is_empty() {
                let rest = String::from_utf8_lossy(&piece).into_owned();
                return Ok((!piece.is_empty()).then_some(rest));
            }
            let end = there.iter().position(|byte| b"\r\n".contains(byte));
            piece.extend_from_slice(&there[..end.unwrap_or(there.len())]);
            let taken = end.map_or(there.len(), |end| end + 1);
            self.0.consume(taken);
            if end.is_some() {
                return Ok(Some(String::from_utf8_lossy(&piece).into_owned()));
            }
        }
    }
}

/// Meaning of a piece of cargo's output.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    /// An update of the bar, put into words.
    Progress(String),
    /// A line about a step that began or ended. It is left out, because the bar shows the same.
    Step,
    /// Another cargo holds the lock of the build folder.
    Waits,
    Other,
}

impl Said {
    fn read(piece: &str) -> Self {
        /// Verbs with which cargo begins a step's line. They are right-aligned.
        const STEPS: [&str; 10] = [
            "Compiling",
            "Checking",
            "Fresh",
            "Finished",
            "Downloaded",
            "Updating",
            "Locking",
            "Adding",
            "Running",
            "Dirty",
        ];
        // cargo erases the bar with blanks, or with a sequence that begins with an escape.
        let text = piece.trim_start_matches("\u{1b}[K").trim();
        let (verb, rest) = text.split_once(' ').unwrap_or((text, ""));
        if text.is_empty() || STEPS.contains(&verb) && piece.starts_with(' ') {
            return Self::Step;
        }
        match verb {
            "Building" => match rest.split_once("] ") {
                Some((_, done)) => Self::Progress(format!("building: {}", bar(done))),
                None => Self::Other,
            },
            "Downloading" => Self::Progress(format!("downloading: {rest}")),
            "Blocking" => Self::Waits,
            _ => Self::Other,
        }
    }
}

/// Puts the state of the bar, such as `12/345: a, b...`, into words.
fn bar(done: &str) -> String {
    let (numbers, names) = done.split_once(": ").unwrap_or((done, ""));
    let numbers = numbers.trim_end_matches(':').replace('/', " of ");
    match names {
        "" => numbers,
        names => format!("{numbers} ({names})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_become_lines_and_mistakes_stay() {
        let progress = |text: &str| Said::Progress(text.to_owned());
        for (piece, said) in [
            (
                "    Building [=====>            ] 12/345: syn, hvprobe-linux",
                progress("building: 12 of 345 (syn, hvprobe-linux)"),
            ),
            (
                "\u{1b}[K    Building [> ] 0/3",
                progress("building: 0 of 3"),
            ),
            (
                " Downloading 3 crates, remaining bytes: 1.2MB",
                progress("downloading: 3 crates, remaining bytes: 1.2MB"),
            ),
            ("   Compiling syn v2.0.1", Said::Step),
            ("    Finished `dev` profile in 3s", Said::Step),
            ("\u{1b}[K", Said::Step),
            ("", Said::Step),
            (
                "    Blocking waiting for file lock on build directory",
                Said::Waits,
            ),
            ("error[E0308]: mismatched types", Said::Other),
            ("Compiling is no step here", Said::Other),
        ] {
            assert_eq!(Said::read(piece), said, "{piece:?}");
        }
    }

    #[test]
    fn pieces_end_with_lines_or_carriage_returns() {
        let text = b"a\rb\r\nc\n\xff\nlast";
        let mut pieces = Pieces(BufReader::with_capacity(2, &text[..]));
        let mut all = Vec::new();
        while let Some(piece) = pieces.next().unwrap() {
            all.push(piece);
        }
        assert_eq!(all, ["a", "b", "", "c", "\u{fffd}", "last"]);
    }
}
