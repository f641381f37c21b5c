//! Errors in texts, with their columns.
//!
//! Invariant: only a part of bounded length is shown of a long text.

use std::fmt;

/// Error in a text, with its column.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ParseError {
    /// Column of the error, in characters from 0; the length of the text if something is missing at its end.
    pub column: usize,
    /// The mistake, and how to correct it.
    pub message: String,
}

/// Maximum length of a text that is shown whole, in characters.
const LONGEST: usize = 1024;
/// Number of characters of a longer text that are shown on each side of the column.
const AROUND: usize = 100;

impl ParseError {
    /// Returns two lines: the text, and a caret under the column. Of a long text, only the part around the column
    /// is shown. Control characters other than tabs become `?`, so the result is safe to print.
    #[must_use]
    pub fn render(&self, text: &str) -> String {
        let length = text.chars().count();
        let column = self.column.min(length);
        let (first, last) = match length > LONGEST {
            true => (column.saturating_sub(AROUND), length.min(column + AROUND)),
            false => (0, length),
        };
        let before = if first > 0 { "…" } else { "" };
        let shown = || {
            before
                .chars()
                .chain(text.chars().skip(first).take(last - first))
        };
        let mut picture: String = shown().map(pictured).collect();
        picture.push_str(if last < length { "…\n" } else { "\n" });
        // Tabs are repeated, so that the caret is under its column for every width of a tab.
        picture.extend(
            shown()
                .take(before.chars().count() + column - first)
                .map(|c| if c == '\t' { '\t' } else { ' ' }),
        );
        picture.push('^');
        picture
    }
}

/// Maximum length of a word that a message repeats, in characters.
const WORD: usize = 64;

/// Returns `word` as messages repeat it: shortened, with `?` for control characters.
#[must_use]
pub fn bounded(word: &str) -> impl fmt::Display {
    let mut shown: String = word.chars().take(WORD).map(printable).collect();
    if word.chars().nth(WORD).is_some() {
        shown.push('…');
    }
    shown
}

/// Like [`bounded`], in backquotes.
pub(crate) fn quoted(word: &str) -> impl fmt::Display {
    format!("`{}`", bounded(word))
}

/// Returns the character that stands for `c` in the line above a caret: a tab stays, other control characters
/// become `?`.
fn pictured(c: char) -> char {
    if c == '\t' { c } else { printable(c) }
}

/// Replaces a control character by `?`.
fn printable(c: char) -> char {
    if c.is_control() { '?' } else { c }
}

/// Returns an error in a text.
pub(crate) fn error<T>(column: usize, message: impl Into<String>) -> Result<T, ParseError> {
    Err(ParseError {
        column,
        message: message.into(),
    })
}

#[cfg(test)]
mod tests;
