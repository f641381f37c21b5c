//! Lines of functions, in the syntax of `perf probe --line`.
//!
//! ```text
//! lines = FUNC ["@" SRC] [":" LINE ["+" COUNT | "-" LINE]]
//! ```
//!
//! LINE counts from the function's first line, which is 0. Without `+COUNT` or `-LINE`, the range includes all
//! lines from LINE on; without `:LINE`, all lines of the function.

use std::ops::RangeInclusive;

use crate::number::number_in;
use crate::parse_error::{ParseError, error};
use crate::point::{At, Point};

/// Range of lines in each function that has a given name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineRange {
    /// Name that the functions have in the sources.
    pub function: String,
    /// End of the path of the functions' file, if given.
    pub file: Option<String>,
    /// Line numbers, relative to the function's first line, which is 0.
    pub lines: RangeInclusive<u64>,
}

impl LineRange {
    /// Parses a range.
    ///
    /// # Errors
    /// Returns the column and the reason if the text is not a range.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        const FORMS: &str = "lines are listed for functions: write FUNC[@SRC][:LINE[-LINE|+COUNT]]";
        let end = text.find([':', ';']).unwrap_or(text.len());
        let (of, range) = text.split_at(end);
        let is_file = !of.contains('@') && of.contains(['.', '/']);
        if is_file || range.starts_with(';') {
            return error(0, FORMS);
        }
        let Point::Function {
            name: function,
            file,
            at: At::Entry,
        } = Point::parse(of)?
        else {
            return error(of.find(['+', '%']).unwrap_or(0), FORMS);
        };
        let lines = match range.strip_prefix(':') {
            None => 0..=u64::MAX,
            Some(range) => lines(end + 1, range)?,
        };
        Ok(Self {
            function,
            file,
            lines,
        })
    }
}

/// Parses the text after the colon, which begins at `column`.
fn lines(column: usize, range: &str) -> Result<RangeInclusive<u64>, ParseError> {
    let number = |column, digits: &str, what: &str, behind: char| {
        number_in(column, digits, what, || {
            format!("missing {what} after `{behind}`")
        })
    };
    let end = range.find(['+', '-']).unwrap_or(range.len());
    let first = number(column, &range[..end], "line", ':')?;
    let column = column + end + 1;
    let last = match range[end..].split_at_checked(1) {
        None => u64::MAX,
        Some(("+", count)) => match number(column, count, "count", '+')?.checked_sub(1) {
            None => return error(column, "one line at least"),
            Some(more) => first.saturating_add(more),
        },
        Some((_, last)) => number(column, last, "line", '-')?,
    };
    if last < first {
        return error(
            column,
            format!("the last line is before the first, {first}"),
        );
    }
    Ok(first..=last)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whatever_is_asked_for_is_lines_or_a_mistake_in_it(text in "[fé@.:;%+ 0-9x-]{0,12}") {
            match LineRange::parse(&text) {
                Ok(LineRange { lines, .. }) => prop_assert!(!lines.is_empty()),
                Err(error) => prop_assert!(error.column <= text.chars().count(), "{error:?}"),
            }
        }
    }

    #[test]
    fn ranges_are_read_as_perf_reads_them() {
        for (text, file, lines) in [
            ("vfs_read", None, 0..=u64::MAX),
            ("vfs_read:0", None, 0..=u64::MAX),
            ("vfs_read:7", None, 7..=u64::MAX),
            ("vfs_read:7-7", None, 7..=7),
            ("vfs_read:0x7-12", None, 7..=12),
            ("vfs_read:7+3", None, 7..=9),
            ("vfs_read:7+18446744073709551615", None, 7..=u64::MAX),
            (
                "vfs_read@fs/read_write.c",
                Some("fs/read_write.c"),
                0..=u64::MAX,
            ),
            ("vfs_read@read_write.c:2-4", Some("read_write.c"), 2..=4),
        ] {
            let wanted = LineRange {
                function: "vfs_read".to_owned(),
                file: file.map(str::to_owned),
                lines,
            };
            assert_eq!(LineRange::parse(text), Ok(wanted), "{text}");
        }
    }

    #[test]
    fn mistakes_are_reported_where_they_are() {
        for (text, column) in [
            ("", 0),
            ("fs/read_write.c", 0),
            ("fs/read_write.c:3", 0),
            ("vfs_read;ret=*", 0),
            ("vfs_read@a.c;x", 0),
            ("vfs_read+5", 8),
            ("vfs_read%return", 8),
            ("vfs_read@", 9),
            ("vfs_read:", 9),
            ("vfs_read:x", 9),
            ("vfs_read:-3", 9),
            ("vfs_read:3-", 11),
            ("vfs_read:3+", 11),
            ("vfs_read:3+0", 11),
            ("vfs_read:3-2", 11),
            ("vfs_read:3-4-5", 12),
            ("vfs_read:3:4", 10),
            ("vfs_read:99999999999999999999", 9),
            ("vfs_read:3-99999999999999999999", 11),
            ("vfs read", 3),
            ("é:1", 0),
        ] {
            let column_of = LineRange::parse(text).map_err(|error| error.column);
            assert_eq!(column_of, Err(column), "{text}");
        }
    }
}
