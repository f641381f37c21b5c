//! Points in a kernel's sources, in the syntax of `perf probe`.
//!
//! ```text
//! point = FUNC ["@" SRC] [":" [LINE] | "+" [OFFSET] | "%return" | ";" TEXT] | SRC (":" LINE | ";" TEXT) | "0x" HEX
//! ```
//!
//! In a function, LINE counts from the function's first line, which is 0; in a source file, it counts from 1. As in
//! perf, a name that contains a period is that of a file if a colon or semicolon follows, FUNC may be a pattern for
//! many functions, and a missing number after `:` or `+` is 0. Invariant: the printed form of a parsed [`Point`]
//! parses to the same point.

use std::fmt;

use hvprobe_arch::Gva;

use crate::definition::{is_pattern, read_pattern};
use crate::number::{number_in, strip_hex};
use crate::parse_error::{ParseError, error};
use crate::symbol::symbol_length;

/// Point in the sources.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// Point in a function: in all copies of its code, including those that are inlined elsewhere.
    Function {
        /// Name of the function in the sources, or a shell-style pattern for several names.
        name: String,
        /// End of the path of the function's file, if given.
        file: Option<String>,
        /// Position in the function.
        at: At,
    },
    /// Line of a file.
    Line {
        /// End of the file's path.
        file: String,
        /// Line number, from 1.
        line: u64,
    },
    /// Lines of a file that contain a text.
    Text {
        /// End of the file's path.
        file: String,
        /// The text.
        text: String,
    },
    /// Address.
    Address(Gva),
}

/// Position in a function.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Start of the function's code.
    Entry,
    /// Line, relative to the function's first line.
    Line(u64),
    /// Offset in the function's code, in bytes.
    Offset(u64),
    /// Returns of the function.
    Return,
    /// Lines that contain a text.
    Text(String),
}

impl Point {
    /// Parses a point.
    ///
    /// # Errors
    /// Returns the column and the reason if the text is not a point.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let odd = |c: &char| !('!'..='~').contains(c);
        if let Some((column, c)) = text.chars().enumerate().find(|(_, c)| odd(c)) {
            return error(column, format!("{c:?} cannot be part of a probe point"));
        }
        if strip_hex(text).is_some() {
            let address = number_in(0, text, "address", || "missing address".to_owned())?;
            return Ok(Self::Address(Gva(address)));
        }
        let end = text.find(['@', ':', '+', '%', ';']).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        if rest.starts_with([':', ';']) && name.contains('.') {
            let file = name.to_owned();
            if let Some(text) = rest.strip_prefix(';') {
                let text = text_behind(end + 1, text)?;
                return Ok(Self::Text { file, text });
            }
            let line = line(end + 1, &rest[1..])?;
            if line == 0 {
                return error(end + 1, "the lines of a file count from 1");
            }
            return Ok(Self::Line { file, line });
        }
        let length = match is_pattern(name) {
            true => read_pattern(0, name)?.len(),
            false => symbol_length(name),
        };
        if length == 0 || name.starts_with(|c: char| c.is_ascii_digit()) {
            return error(
                0,
                "a function or a source file (`fs/file.c:LINE`) belongs here",
            );
        }
        if let Some(c) = name[length..].chars().next() {
            return error(length, format!("`{c}` cannot be part of a function's name"));
        }
        let (file, rest, at) = match rest.strip_prefix('@') {
            None => (None, rest, end),
            Some(behind) => {
                let len = behind.find([':', '+', '%', ';']).unwrap_or(behind.len());
                if len == 0 {
                    return error(end + 1, "missing source file behind `@`");
                }
                let (file, rest) = behind.split_at(len);
                (Some(file.to_owned()), rest, end + 1 + len)
            }
        };
        let at = match rest.split_at_checked(1) {
            None => At::Entry,
            Some((":", "")) => At::Line(0),
            Some((":", digits)) => At::Line(line(at + 1, digits)?),
            Some(("+", "")) => At::Offset(0),
            Some(("+", digits)) => At::Offset(number_in(at + 1, digits, "offset", || {
                "missing offset after `+`".to_owned()
            })?),
            Some(("%", "return")) => At::Return,
            Some((";", text)) => At::Text(text_behind(at + 1, text)?),
            Some(("%", _)) => return error(at, "only `%return` can follow a function after `%`"),
            Some(_) => return error(at, "`:LINE`, `+OFFSET` or `%return` can follow a function"),
        };
        let name = name.to_owned();
        Ok(Self::Function { name, file, at })
    }

    /// Returns the pattern for the functions' names, if the point has one.
    #[must_use]
    pub fn pattern(&self) -> Option<&str> {
        match self {
            Self::Function { name, .. } => Some(name.as_str()).filter(|name| is_pattern(name)),
            Self::Line { .. } | Self::Text { .. } | Self::Address(_) => None,
        }
    }
}

/// Parses the text after a semicolon.
fn text_behind(column: usize, text: &str) -> Result<String, ParseError> {
    match text.is_empty() {
        true => error(column, "missing text behind `;`"),
        false => Ok(text.to_owned()),
    }
}

fn line(column: usize, digits: &str) -> Result<u64, ParseError> {
    number_in(column, digits, "line", || {
        "missing line after `:`".to_owned()
    })
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line { file, line } => write!(f, "{file}:{line}"),
            Self::Text { file, text } => write!(f, "{file};{text}"),
            Self::Address(at) => write!(f, "{at}"),
            Self::Function { name, file, at } => {
                f.write_str(name)?;
                if let Some(file) = file {
                    write!(f, "@{file}")?;
                }
                write!(f, "{at}")
            }
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry => Ok(()),
            Self::Line(line) => write!(f, ":{line}"),
            Self::Offset(offset) => write!(f, "+{offset:#x}"),
            Self::Return => f.write_str("%return"),
            Self::Text(text) => write!(f, ";{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_read_as_perf_reads_them() {
        let function = |file: Option<&str>, at| Point::Function {
            name: "vfs_read".to_owned(),
            file: file.map(str::to_owned),
            at,
        };
        let source = |line| Point::Line {
            file: "fs/read_write.c".to_owned(),
            line,
        };
        for (text, wanted) in [
            ("vfs_read", function(None, At::Entry)),
            ("vfs_read:3", function(None, At::Line(3))),
            ("vfs_read:0", function(None, At::Line(0))),
            ("vfs_read:", function(None, At::Line(0))),
            ("vfs_read+0x10", function(None, At::Offset(16))),
            ("vfs_read+", function(None, At::Offset(0))),
            (
                "0xffffffff81000000",
                Point::Address(Gva(0xffff_ffff_8100_0000)),
            ),
            ("vfs_read%return", function(None, At::Return)),
            (
                "vfs_read;ret=*",
                function(None, At::Text("ret=*".to_owned())),
            ),
            (
                "vfs_read@fs/read_write.c:3",
                function(Some("fs/read_write.c"), At::Line(3)),
            ),
            ("fs/read_write.c:452", source(452)),
            (
                "fs/read_write.c;ret=*:@x",
                Point::Text {
                    file: "fs/read_write.c".to_owned(),
                    text: "ret=*:@x".to_owned(),
                },
            ),
        ] {
            let point = Point::parse(text).unwrap();
            assert_eq!(point, wanted, "{text}");
            assert_eq!(Point::parse(&point.to_string()).unwrap(), wanted);
        }
    }

    #[test]
    fn patterns_stand_for_functions() {
        for text in ["vfs_*", "vfs_[rw]*@fs/read_write.c:1", "vfs_rea?%return"] {
            let point = Point::parse(text).unwrap();
            assert!(point.pattern().is_some(), "{text}");
            assert_eq!(point.to_string(), text);
        }
        assert_eq!(Point::parse("vfs_read;a*").unwrap().pattern(), None);
    }

    #[test]
    fn mistakes_are_reported_where_they_are() {
        for (text, column) in [
            ("", 0),
            ("1f:2", 0),
            ("vfs read", 3),
            ("vfs_read:x", 9),
            ("vfs_[:1", 4),
            ("vfs_*-1", 5),
            ("0x10+4", 4),
            ("0xg", 2),
            ("a.c:", 4),
            ("vfs_read%exit", 8),
            ("vfs_read@:3", 9),
            ("vfs-read", 3),
            ("a.c:0", 4),
            ("a.c;", 4),
            ("vfs_read;", 9),
        ] {
            assert_eq!(Point::parse(text).unwrap_err().column, column, "{text}");
        }
    }
}
