//! Files of definitions: what people write into `kprobe_events`, or read from it.
//!
//! Each line is a definition, as in the kernel (`trace_parse_run_command` in kernel/trace/trace.c): what
//! follows a `#` is a comment, wherever it stands, and lines of nothing are skipped.

use super::line::Definition;
use super::parse::parse;
use crate::parse_error::ParseError;

/// A definition, and where it stands in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The number of its line, from 1.
    pub number: usize,
    /// What it says.
    pub definition: Definition,
}

/// Why a file of definitions is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {number}: {source}")]
pub struct FileError {
    /// The number of the line, from 1.
    pub number: usize,
    /// The line.
    pub text: String,
    /// What is wrong with it.
    pub source: ParseError,
}

impl FileError {
    /// The line with a caret under what is wrong, as two lines that are safe to print.
    #[must_use]
    pub fn render(&self) -> String {
        self.source.render(&self.text)
    }
}

/// Reads a file of definitions.
///
/// # Errors
/// At the first line that is no definition. Removing an event (`-:EVENT`) is none: a file says what there
/// is to be.
pub fn parse_file(text: &str) -> Result<Vec<Line>, FileError> {
    let mut lines = Vec::new();
    for (number, text) in (1..).zip(text.lines()) {
        let (line, _) = text.split_once('#').unwrap_or((text, ""));
        if line.trim().is_empty() {
            continue;
        }
        match parse(line) {
            Ok(definition) => lines.push(Line { number, definition }),
            Err(source) => {
                let text = text.to_owned();
                return Err(FileError {
                    number,
                    text,
                    source,
                });
            }
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn check(text: &str, expect: Expect) {
        let found = match parse_file(text) {
            Ok(lines) => lines
                .iter()
                .map(|line| format!("{}: {}\n", line.number, line.definition))
                .collect(),
            Err(error) => format!("{error}\n{}\n", error.render()),
        };
        expect.assert_eq(&found);
    }

    #[test]
    fn lines_are_definitions_comments_or_nothing() {
        check(
            "# what is opened\n\np:g/e vfs_open path=%di # and where\r\n \t\nr4 vfs_open $retval",
            expect![[r#"
                3: p:g/e vfs_open path=%di
                5: r4 vfs_open $retval
            "#]],
        );
        check("", expect![""]);
        check("#p f", expect![""]);
    }

    #[test]
    fn a_bad_line_is_shown_with_its_number() {
        check(
            "p vfs_read\n\n  p vfs_open %bar # no such\np",
            expect![[r#"
                line 3: Invalid register name
                  p vfs_open %bar # no such
                             ^
            "#]],
        );
        check(
            "p:x vfs_read\n-:x",
            expect![[r#"
                line 2: not supported: removing events by definition (`-`); write `p SYMBOL` or `r SYMBOL`
                -:x
                ^
            "#]],
        );
        check(
            "p vfs_read \\\"a#b\"",
            expect![[r##"
                line 1: String is not closed with '"'
                p vfs_read \"a#b"
                              ^
            "##]],
        );
        check(
            "p f\0",
            expect![[r#"
                line 1: control character '\0': a definition is one line of ASCII
                p f?
                   ^
            "#]],
        );
    }
}
