//! Words of a script of GRUB, with their quoting (`grub-core/script/yylex.l`).

use std::iter::Peekable;
use std::str::Chars;

/// Part of a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Text(String),
    Variable {
        name: String,
        /// Whether the value stays one word.
        is_quoted: bool,
    },
}

/// A word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) parts: Vec<Part>,
    /// Whether a part of it is quoted, so that it is no keyword.
    pub(super) is_quoted: bool,
}

impl Word {
    /// Returns the text of a word without quotes and variables, which may be a keyword.
    pub(super) fn bare(&self) -> Option<&str> {
        match &self.parts[..] {
            [Part::Text(text)] if !self.is_quoted => Some(text),
            _ => None,
        }
    }
}

/// Token of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Word(Word),
    /// A line feed or `;`.
    End,
    /// `{`
    Open,
    /// `}`
    Close,
}

/// Splits a script into tokens. Returns what is wrong if it cannot be split.
pub(super) fn tokens(script: &str) -> Result<Vec<Token>, String> {
    let mut lexer = Lexer {
        rest: script.chars().peekable(),
        tokens: Vec::new(),
        word: None,
        text: String::new(),
    };
    lexer.split()?;
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: Peekable<Chars<'a>>,
    tokens: Vec<Token>,
    /// The word that was begun.
    word: Option<Word>,
    /// Its last part, if that is text.
    text: String,
}

impl Lexer<'_> {
    fn split(&mut self) -> Result<(), String> {
        while let Some(c) = self.rest.next() {
            match c {
                ' ' | '\t' | '\r' => self.end_word(),
                '\n' | ';' => self.token(Token::End),
                '{' => self.token(Token::Open),
                '}' => self.token(Token::Close),
                '|' | '&' | '<' | '>' => return Err(format!("`{c}` without quotes")),
                '#' if self.word.is_none() => while self.rest.next_if(|c| *c != '\n').is_some() {},
                '\'' => self.single_quoted()?,
                '"' => self.double_quoted()?,
                '\\' => match self.rest.next() {
                    // Continues the line.
                    Some('\n') | None => {}
                    Some(c) => {
                        self.word().is_quoted = true;
                        self.text.push(c);
                    }
                },
                // A text for translation.
                '$' if self.rest.next_if_eq(&'"').is_some() => self.double_quoted()?,
                '$' => self.variable(false),
                c => {
                    self.word();
                    self.text.push(c);
                }
            }
        }
        self.end_word();
        Ok(())
    }

    /// Returns the word that was begun, or begins one.
    fn word(&mut self) -> &mut Word {
        self.word.get_or_insert_default()
    }

    fn token(&mut self, token: Token) {
        self.end_word();
        self.tokens.push(token);
    }

    fn end_word(&mut self) {
        self.end_text();
        if let Some(word) = self.word.take() {
            self.tokens.push(Token::Word(word));
        }
    }

    fn end_text(&mut self) {
        if !self.text.is_empty() {
            let text = std::mem::take(&mut self.text);
            self.word().parts.push(Part::Text(text));
        }
    }

    fn single_quoted(&mut self) -> Result<(), String> {
        self.word().is_quoted = true;
        loop {
            match self.rest.next() {
                Some('\'') => return Ok(()),
                Some(c) => self.text.push(c),
                None => return Err("a `'` that is not closed".to_owned()),
            }
        }
    }

    fn double_quoted(&mut self) -> Result<(), String> {
        self.word().is_quoted = true;
        loop {
            match self.rest.next() {
                Some('"') => return Ok(()),
                Some('$') => self.variable(true),
                Some('\\') => match self.rest.next_if(|c| matches!(c, '"' | '\\' | '$' | '\n')) {
                    Some('\n') => {}
                    Some(c) => self.text.push(c),
                    None => self.text.push('\\'),
                },
                Some(c) => self.text.push(c),
                None => return Err("a `\"` that is not closed".to_owned()),
            }
        }
    }

    /// Reads a variable after its `$`. Without a name, the `$` is text.
    fn variable(&mut self, is_quoted: bool) {
        let mut ahead = self.rest.clone();
        let braced = ahead.next_if_eq(&'{').is_some();
        let mut name = String::new();
        match ahead.peek() {
            Some('?' | '#' | '*' | '@') => name.extend(ahead.next()),
            Some('0'..='9') => {
                while let Some(c) = ahead.next_if(char::is_ascii_digit) {
                    name.push(c);
                }
            }
            _ => {
                while let Some(c) = ahead.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
                    name.push(c);
                }
            }
        }
        if name.is_empty() || (braced && ahead.next_if_eq(&'}').is_none()) {
            self.word();
            self.text.push('$');
            return;
        }
        self.rest = ahead;
        self.end_text();
        let part = Part::Variable { name, is_quoted };
        self.word().parts.push(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes tokens with `[`, `]` around words, `<`, `>` around quoted ones, and `$name` or `"$name"` for
    /// variables.
    fn shown(script: &str) -> String {
        let tokens = match tokens(script) {
            Ok(tokens) => tokens,
            Err(why) => return why,
        };
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Variable { name, is_quoted } if *is_quoted => format!("\"${name}\""),
            Part::Variable { name, .. } => format!("${name}"),
        };
        let token = |token: &Token| match token {
            Token::End => ";".to_owned(),
            Token::Open => "{".to_owned(),
            Token::Close => "}".to_owned(),
            Token::Word(word) => {
                let parts: String = word.parts.iter().map(part).collect();
                match word.is_quoted {
                    true => format!("<{parts}>"),
                    false => format!("[{parts}]"),
                }
            }
        };
        tokens.iter().map(token).collect()
    }

    #[test]
    fn quoting_is_that_of_grub() {
        for (script, expected) in [
            ("set a=b # no\n#x\nc#d", "[set][a=b];;[c#d]"),
            ("menuentry 'a b' --x {", "[menuentry]<a b>[--x]{"),
            (r#""a \"b\" \x" '\'"#, r#"<a "b" \x><\>"#),
            ("a\\\nb \\\\ \\ c", "[ab]<\\>< c>"),
            ("\"a\\\nb\"", "<ab>"),
            ("x${a}y \"$b\" $1 ${?} $", "[x$ay]<\"$b\">[$1][$?][$]"),
            ("'' \"\"", "<><>"),
            ("$\"translated\"", "<translated>"),
            ("a|b", "`|` without quotes"),
            ("'a", "a `'` that is not closed"),
            ("\"a$", "a `\"` that is not closed"),
            ("'a'b\"c\"", "<abc>"),
        ] {
            assert_eq!(shown(script), expected, "{script}");
        }
    }
}
