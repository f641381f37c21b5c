//! Walking through a script.
//!
//! What is kept true: a place is a character, never a byte, and nothing is read twice.

use crate::number::number_in;
use crate::parse_error::{ParseError, error};

/// The longest text between quotes.
const TEXT_MAX: usize = 1024;

/// A place in a script.
#[derive(Debug)]
pub(super) struct Cursor {
    text: Vec<char>,
    at: usize,
    /// The conditions for the preprocessor that have not ended: where the last line of each is, and its name.
    conditions: Vec<(usize, String)>,
}

/// A text between quotes, with the column that each of its characters stands at.
#[derive(Debug)]
pub(super) struct Quoted {
    /// The characters, and where they stand.
    pub(super) characters: Vec<(usize, char)>,
    /// Where it ends.
    pub(super) end: usize,
}

impl Quoted {
    /// Its characters.
    pub(super) fn text(&self) -> String {
        self.characters.iter().map(|(_, c)| c).collect()
    }
}

impl Cursor {
    /// The beginning of `text`.
    pub(super) fn new(text: &str) -> Self {
        Self {
            text: text.chars().collect(),
            at: 0,
            conditions: Vec::new(),
        }
    }

    /// The column.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The character here.
    pub(super) fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    /// Whether `what` is here.
    pub(super) fn sees(&self, what: &str) -> bool {
        let mut rest = self.text[self.at..].iter().copied();
        what.chars().all(|c| rest.next() == Some(c))
    }

    /// Refuses the script here.
    pub(super) fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        error(self.at, message)
    }

    /// Goes behind `what`, if it is here.
    pub(super) fn eat(&mut self, what: &str) -> bool {
        let found = self.sees(what);
        if found {
            self.at += what.chars().count();
        }
        found
    }

    /// Goes behind the word `what`, if it is here and no longer word is.
    pub(super) fn eat_word(&mut self, what: &str) -> bool {
        let behind = self.text.get(self.at + what.chars().count());
        let is_whole = !behind.is_some_and(|c| *c == '_' || c.is_ascii_alphanumeric());
        is_whole && self.eat(what)
    }

    /// Goes behind `what`, which has to be here.
    pub(super) fn expect(&mut self, what: &str, message: &str) -> Result<(), ParseError> {
        match self.eat(what) {
            true => Ok(()),
            false => self.error(message),
        }
    }

    /// The characters from here on that belong.
    pub(super) fn take(&mut self, belongs: impl Fn(char) -> bool) -> String {
        let rest = &self.text[self.at..];
        let taken: String = rest.iter().copied().take_while(|c| belongs(*c)).collect();
        self.at += taken.chars().count();
        taken
    }

    /// Letters, digits and `_` from here on.
    pub(super) fn word(&mut self) -> String {
        self.take(|c| c == '_' || c.is_ascii_alphanumeric())
    }

    /// Goes behind blanks, line breaks, comments, and lines for the preprocessor, as types are known without headers.
    ///
    /// # Errors
    /// When what follows depends on a condition for the preprocessor: both of its sides would be taken.
    pub(super) fn blanks(&mut self) -> Result<(), ParseError> {
        loop {
            self.take(char::is_whitespace);
            let start = self.at;
            // Files that are read together have a line with `#!` each.
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

    /// Whether nothing but blanks comes before in this line.
    fn begins_line(&self) -> bool {
        let mut before = self.text[..self.at].iter().rev();
        before
            .find(|c| **c == '\n' || !c.is_whitespace())
            .is_none_or(|c| *c == '\n')
    }

    /// Goes to the end of the line for the preprocessor whose `#` is at `start`, and of those that a `\` adds to it.
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

    /// A decimal or 0x number, of `what`.
    pub(super) fn number(&mut self, what: &str) -> Result<u64, ParseError> {
        let start = self.at;
        let word = self.word();
        let missing = || format!("missing {what}: a number belongs here");
        number_in(start, &word, what, missing)
    }

    /// A text between double quotes, the first of which is here.
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
