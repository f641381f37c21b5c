//! Walking through a text, one word at a time.

use crate::number::number_in;
use crate::parse_error::{ParseError, error};

/// A place in a text.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    /// Where the text begins.
    column: usize,
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// The beginning of `text`, which is ASCII and begins at `column`.
    pub(crate) fn new(column: usize, text: &'a str) -> Self {
        let at = 0;
        Self { column, text, at }
    }

    /// The column.
    pub(crate) fn at(&self) -> usize {
        self.column + self.at
    }

    /// What is left.
    pub(crate) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Refuses the text here.
    pub(crate) fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        error(self.at(), message)
    }

    /// Goes behind `what`, if it is here.
    pub(crate) fn eat(&mut self, what: &str) -> bool {
        let found = self.rest().starts_with(what);
        if found {
            self.at += what.len();
        }
        found
    }

    /// Goes behind `what`, which has to be here.
    pub(crate) fn expect(&mut self, what: &str, message: &str) -> Result<(), ParseError> {
        if self.eat(what) {
            return Ok(());
        }
        self.error(message)
    }

    /// Goes behind blanks.
    pub(crate) fn blanks(&mut self) {
        while self.eat(" ") || self.eat("\t") {}
    }

    /// Letters and digits from here on.
    pub(crate) fn word(&mut self) -> &'a str {
        self.take(|c| c.is_ascii_alphanumeric())
    }

    /// Digits from here on.
    pub(crate) fn digits(&mut self) -> &'a str {
        self.take(|c| c.is_ascii_digit())
    }

    /// The characters from here on that belong.
    pub(crate) fn take(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// A decimal or 0x number.
    pub(crate) fn number(&mut self, what: &str) -> Result<u64, ParseError> {
        let start = self.at();
        let word = self.word();
        let missing = || format!("missing {what}: a number belongs here");
        number_in(start, word, what, missing)
    }

    /// A number that is `most` at most.
    pub(crate) fn count(&mut self, what: &str, most: usize) -> Result<u16, ParseError> {
        let start = self.at();
        let number = self.number(what)?;
        match u16::try_from(number) {
            Ok(count) if usize::from(count) <= most => Ok(count),
            _ => error(start, format!("{what} of {number}: at most {most}")),
        }
    }
}

/// The first character of `text` that is neither printable ASCII nor a tab, and its column. Without one, a
/// byte is a character, so that byte offsets are columns.
pub(crate) fn unprintable(text: &str) -> Option<(usize, char)> {
    let mut characters = text.chars().enumerate();
    characters.find(|(_, c)| !matches!(c, ' '..='~' | '\t'))
}
