//! Character-by-character reading of a script.
//!
//! Invariants: positions count characters, not bytes, and nothing is read twice.

use crate::number::number_in;
use crate::parse_error::{ParseError, error};

/// Maximum length of a text in quotes.
const TEXT_MAX: usize = 1024;

/// Position in a script.
#[derive(Debug)]
pub(super) struct Cursor {
    text: Vec<char>,
    at: usize,
    /// Open preprocessor conditions, each with the position and the name of its latest directive.
    conditions: Vec<(usize, String)>,
}

/// Text in quotes, with the column of each character.
#[derive(Debug)]
pub(super) struct Quoted {
    /// Characters with their columns.
    pub(super) characters: Vec<(usize, char)>,
    /// Column of the closing quote.
    pub(super) end: usize,
}

impl Quoted {
    /// Returns the characters.
    pub(super) fn text(&self) -> String {
        self.characters.iter().map(|(_, c)| c).collect()
    }
}

impl Cursor {
    /// Makes a cursor at the start of `text`.
    pub(super) fn new(text: &str) -> Self {
        Self {
            text: text.chars().collect(),
            at: 0,
            conditions: Vec::new(),
        }
    }

    /// Returns the current column.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Returns the next character without taking it.
    pub(super) fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    /// Returns whether `what` comes next.
    pub(super) fn sees(&self, what: &str) -> bool {
        let mut rest = self.text[self.at..].iter().copied();
        what.chars().all(|c| rest.next() == Some(c))
    }

    /// Returns an error at the current column.
    pub(super) fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        error(self.at, message)
    }

    /// Skips `what` if it comes next.
    pub(super) fn eat(&mut self, what: &str) -> bool {
        let found = self.sees(what);
        if found {
            self.at += what.chars().count();
        }
        found
    }

    /// Skips the word `what` if it comes next and is a whole word.
    pub(super) fn eat_word(&mut self, what: &str) -> bool {
        let behind = self.text.get(self.at + what.chars().count());
        let is_whole = !behind.is_some_and(|c| *c == '_' || c.is_ascii_alphanumeric());
        is_whole && self.eat(what)
    }

    /// Skips `what`, which must come next.
    pub(super) fn expect(&mut self, what: &str, message: &str) -> Result<(), ParseError> {
        match self.eat(what) {
            true => Ok(()),
            false => self.error(message),
        }
    }

    /// Takes the characters that come next while `belongs` accepts them.
    pub(super) fn take(&mut self, belongs: impl Fn(char) -> bool) -> String {
        let rest = &self.text[self.at..];
        let taken: String = rest.iter().copied().take_while(|c| belongs(*c)).collect();
        self.at += taken.chars().count();
        taken
    }

    /// Takes the letters, digits and `_` that come next.
    pub(super) fn word(&mut self) -> String {
        self.take(|c| c == '_' || c.is_ascii_alphanumeric())
    }

    /// Returns the name that comes next, without taking it. Returns `None` if no name comes next, or if a `(`
    /// follows the name, which makes it the name of a function.
    pub(super) fn name(&self) -> Option<String> {
        let rest = self.text[self.at..].iter().copied();
        let is_of_word = |c: &char| *c == '_' || c.is_ascii_alphanumeric();
        let name: String = rest.clone().take_while(is_of_word).collect();
        let behind = rest.skip_while(is_of_word).find(|c| !c.is_whitespace());
        let is_name = !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit());
        (is_name && behind != Some('(')).then_some(name)
    }

    /// Skips blanks, line breaks, comments and preprocessor lines. The latter are not needed, because types are
    /// known without headers.
    ///
    /// # Errors
    /// Returns an error if a comment or a preprocessor condition has no end. Also returns an error if the following
    /// text depends on a preprocessor condition, because both of its branches would be read.
    pub(super) fn blanks(&mut self) -> Result<(), ParseError> {
        loop {
            self.take(char::is_whitespace);
            let start = self.at;
            // A text may consist of several scripts, each with a `#!` line.
            if self.sees("//") || self.begins_line() && self.sees("#!") {
                self.take(|c| c != '\n');
            } else if self.begins_line() && self.eat("#") {
                self.directive(start);
            } else if self.eat("/*") {
                while !self.eat("*/") {
                    if self.peek().is_none() {
                        return error(start, "this comment has no end: missing `*/`");
                    }
                    self.at += 1;
                }
            } else {
                break;
            }
        }
        match (self.conditions.last(), self.peek()) {
            (Some((at, name)), None) => {
                error(*at, format!("this `#{name}` has no end: missing `#endif`"))
            }
            (Some((at, name)), Some(_)) => {
                let why = format!(
                    "not supported: `#{name}` around parts of a script; conditions are not evaluated here: \
                     leave it out, with what is not meant"
                );
                error(*at, why)
            }
            (None, _) => Ok(()),
        }
    }

    /// Returns whether only blanks precede the position in its line.
    fn begins_line(&self) -> bool {
        let mut before = self.text[..self.at].iter().rev();
        before
            .find(|c| **c == '\n' || !c.is_whitespace())
            .is_none_or(|c| *c == '\n')
    }

    /// Skips the preprocessor line whose `#` is at `start`, and its continuation lines after `\`.
    fn directive(&mut self, start: usize) {
        self.take(|c| c != '\n' && c.is_whitespace());
        let name = self.word();
        match name.as_str() {
            "if" | "ifdef" | "ifndef" => self.conditions.push((start, name)),
            "else" | "elif" => {
                if let Some(last) = self.conditions.last_mut() {
                    *last = (start, name);
                }
            }
            "endif" => {
                self.conditions.pop();
            }
            _ => {}
        }
        loop {
            let line = self.take(|c| c != '\n');
            if !line.ends_with('\\') || self.peek().is_none() {
                return;
            }
            self.at += 1;
        }
    }

    /// Takes a decimal or 0x number. `what` names the number in messages.
    pub(super) fn number(&mut self, what: &str) -> Result<u64, ParseError> {
        let start = self.at;
        let word = self.word();
        let missing = || format!("missing {what}: a number belongs here");
        number_in(start, &word, what, missing)
    }

    /// Takes a text in double quotes; the opening quote comes next.
    pub(super) fn quoted(&mut self) -> Result<Quoted, ParseError> {
        let start = self.at;
        self.at += 1;
        let mut characters = Vec::new();
        loop {
            let at = self.at;
            let Some(c) = self.peek() else {
                return error(start, "this text has no end: missing `\"`");
            };
            self.at += 1;
            let read = match c {
                '"' => {
                    return Ok(Quoted {
                        characters,
                        end: at,
                    });
                }
                '\\' => {
                    let escaped = self.peek();
                    self.at += 1;
                    match escaped {
                        Some('n') => '\n',
                        Some('t') => '\t',
                        Some('r') => '\r',
                        Some(c @ ('"' | '\\')) => c,
                        _ => return error(at, r#"behind `\` there can be n, t, r, " and \"#),
                    }
                }
                '\n' => return error(at, r"a text ends in its line: write \n for a line break"),
                c if c.is_control() && c != '\t' => {
                    return error(at, "a control character cannot be part of a text");
                }
                c => c,
            };
            if characters.len() == TEXT_MAX {
                return error(at, format!("a text has at most {TEXT_MAX} characters"));
            }
            characters.push((at, read));
        }
    }
}
