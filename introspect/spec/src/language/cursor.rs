//! Walking through a text, one word at a time.

use crate::number::number_in;
use crate::parse_error::{ParseError, error};

/// A place in a text.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// The beginning of `text`, which is ASCII.
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    /// The column.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// What is left.
    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Refuses the text here.
    pub(super) fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        error(self.at, message)
    }

    /// Goes behind `what`, if it is here.
    pub(super) fn eat(&mut self, what: &str) -> bool {
        let found = self.rest().starts_with(what);
        if found {
            self.at += what.len();
        }
        found
    }

    /// Goes behind `what`, which has to be here.
    pub(super) fn expect(&mut self, what: &str, message: &str) -> Result<(), ParseError> {
        if self.eat(what) {
            return Ok(());
        }
        self.error(message)
    }

    /// Goes behind blanks.
    pub(super) fn blanks(&mut self) {
        while self.eat(" ") || self.eat("\t") {}
    }

    /// Letters and digits from here on.
    pub(super) fn word(&mut self) -> &'a str {
        self.take(|c| c.is_ascii_alphanumeric())
    }

    /// Digits from here on.
    pub(super) fn digits(&mut self) -> &'a str {
        self.take(|c| c.is_ascii_digit())
    }

    fn take(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// A decimal or 0x number.
    pub(super) fn number(&mut self, what: &str) -> Result<u64, ParseError> {
        let start = self.at;
        let word = self.word();
        let missing = || format!("missing {what}: a number belongs here");
        number_in(start, word, what, missing)
    }

    /// A number that is `most` at most.
    pub(super) fn count(&mut self, what: &str, most: usize) -> Result<u16, ParseError> {
        let start = self.at;
        let number = self.number(what)?;
        match u16::try_from(number) {
            Ok(count) if usize::from(count) <= most => Ok(count),
            _ => error(start, format!("{what} of {number}: at most {most}")),
        }
    }
}
