//! Word-by-word reading of a text.

use crate::number::number_in;
use crate::parse_error::{ParseError, error};

/// Position in a text.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    /// Column of the text's start.
    column: usize,
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Makes a cursor at the start of `text`, which is ASCII and begins at `column`.
    pub(crate) fn new(column: usize, text: &'a str) -> Self {
        let at = 0;
        Self { column, text, at }
    }

    /// Returns the current column.
    pub(crate) fn at(&self) -> usize {
        self.column + self.at
    }

    /// Returns the remaining text.
    pub(crate) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Returns an error at the current column.
    pub(crate) fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        error(self.at(), message)
    }

    /// Skips `what` if it comes next.
    pub(crate) fn eat(&mut self, what: &str) -> bool {
        let found = self.rest().starts_with(what);
        if found {
            self.at += what.len();
        }
        found
    }

    /// Skips `what`, which must come next.
    pub(crate) fn expect(&mut self, what: &str, message: &str) -> Result<(), ParseError> {
        if self.eat(what) {
            return Ok(());
        }
        self.error(message)
    }

    /// Skips blanks.
    pub(crate) fn blanks(&mut self) {
        while self.eat(" ") || self.eat("\t") {}
    }

    /// Takes the letters and digits that come next.
    pub(crate) fn word(&mut self) -> &'a str {
        self.take(|c| c.is_ascii_alphanumeric())
    }

    /// Takes the digits that come next.
    pub(crate) fn digits(&mut self) -> &'a str {
        self.take(|c| c.is_ascii_digit())
    }

    /// Takes the characters that come next while `belongs` accepts them.
    pub(crate) fn take(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// Takes a decimal or 0x number.
    pub(crate) fn number(&mut self, what: &str) -> Result<u64, ParseError> {
        let start = self.at();
        let word = self.word();
        let missing = || format!("missing {what}: a number belongs here");
        number_in(start, word, what, missing)
    }

    /// Takes a number of at most `most`.
    pub(crate) fn count(&mut self, what: &str, most: usize) -> Result<u16, ParseError> {
        let start = self.at();
        let number = self.number(what)?;
        match u16::try_from(number) {
            Ok(count) if usize::from(count) <= most => Ok(count),
            _ => error(start, format!("{what} of {number}: at most {most}")),
        }
    }
}

/// Returns the first character of `text` that is neither printable ASCII nor a tab, and its column. If there is
/// none, each character is one byte, and byte offsets are columns.
pub(crate) fn unprintable(text: &str) -> Option<(usize, char)> {
    let mut characters = text.chars().enumerate();
    characters.find(|(_, c)| !matches!(c, ' '..='~' | '\t'))
}
