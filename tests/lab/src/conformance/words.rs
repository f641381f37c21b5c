//! Parser that splits lines of a shell script into words. It understands as much of the syntax as is needed to find
//! out what is written into which file.
//!
//! Invariant: each part of a word is either literal text or marked as something that a shell would expand. Nothing
//! is expanded here.

/// A part of a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Literal text.
    Text(String),
    /// `$NAME` or `${NAME}`. A name that is a number stands for an argument of the function.
    Variable(String),
    /// Anything else that a shell expands, as written.
    Other(String),
}

/// One shell word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word(pub(super) Vec<Part>);

impl Word {
    /// Returns the word if all of it is literal text.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.0[..] {
            [] => Some(""),
            [Part::Text(text)] => Some(text),
            _ => None,
        }
    }

    /// Returns the name and the value if the word is an assignment.
    pub(super) fn assignment(&self) -> Option<(&str, Self)> {
        let (first, rest) = self.0.split_first()?;
        let Part::Text(text) = first else {
            return None;
        };
        let (name, value) = text.split_once('=')?;
        if !is_name(name) {
            return None;
        }
        let mut parts = Vec::new();
        if !value.is_empty() {
            parts.push(Part::Text(value.to_owned()));
        }
        parts.extend(rest.iter().cloned());
        Some((name, Self(parts)))
    }

    fn push(&mut self, c: char) {
        match self.0.last_mut() {
            Some(Part::Text(text)) => text.push(c),
            _ => self.0.push(Part::Text(c.to_string())),
        }
    }
}

/// One command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Statement {
    pub(super) words: Vec<Word>,
    /// File that the output is redirected to.
    pub(super) to: Option<Word>,
    /// Whether the script negates the status with `!`.
    pub(super) negated: bool,
}

/// Words that may precede a command.
const KEYWORDS: [&str; 11] = [
    "if", "then", "do", "else", "elif", "while", "until", "{", "}", "local", "export",
];

impl Statement {
    /// Removes the words that may precede a command. Returns `None` if no words are left and no file is written.
    fn begun(mut self) -> Option<Self> {
        while let Some(first) = self.words.first().and_then(Word::text) {
            match first {
                "!" => self.negated = true,
                word if KEYWORDS.contains(&word) => {}
                _ => break,
            }
            self.words.remove(0);
        }
        (!self.words.is_empty() || self.to.is_some()).then_some(self)
    }
}

/// Returns whether `name` is a valid name of a variable or function.
pub(super) fn is_name(name: &str) -> bool {
    let of_name = |c: char| c == '_' || c.is_ascii_alphanumeric();
    !name.starts_with(|c: char| c.is_ascii_digit()) && !name.is_empty() && name.chars().all(of_name)
}

/// Splits `line`, in which all quotes are closed, into commands.
pub(super) fn statements(line: &str) -> Vec<Statement> {
    let mut reader = Reader {
        line: line.chars().collect(),
        at: 0,
    };
    let (mut all, mut now) = (Vec::new(), Statement::default());
    loop {
        reader.blanks();
        match reader.peek() {
            None | Some('#') => break,
            Some(';' | '|' | '&' | '(' | ')' | '\n') => {
                reader.at += 1;
                all.extend(std::mem::take(&mut now).begun());
            }
            Some('>') => {
                let to = reader.redirected();
                now.to = to.or(now.to);
            }
            Some('<') => {
                let _input = reader.redirected();
            }
            Some(_) => {
                let word = reader.word();
                let is_stream =
                    matches!(word.text(), Some("1" | "2")) && reader.peek() == Some('>');
                if is_stream {
                    let to = reader.redirected();
                    if word.text() == Some("1") {
                        now.to = to.or(now.to);
                    }
                } else {
                    now.words.push(word);
                }
            }
        }
    }
    all.extend(now.begun());
    all
}

/// Returns whether a quote is open at the end of `line`.
pub(super) fn is_open(line: &str) -> bool {
    let (mut quote, mut before) = (None, ' ');
    let mut letters = line.chars();
    while let Some(c) = letters.next() {
        match (quote, c) {
            (None, '#') if before == ' ' || before == '\t' || before == '\n' => {
                // A comment goes to the end of its line.
                letters.by_ref().find(|c| *c == '\n');
            }
            (None | Some('"'), '\\') => {
                letters.next();
            }
            (None, '\'' | '"' | '`') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            _ => {}
        }
        before = c;
    }
    quote.is_some()
}

/// A line and a position in it.
struct Reader {
    line: Vec<char>,
    at: usize,
}

impl Reader {
    fn peek(&self) -> Option<char> {
        self.line.get(self.at).copied()
    }

    fn take(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += 1;
        Some(next)
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Some(' ' | '\t')) {
            self.at += 1;
        }
    }

    /// Reads the file after `>`, `>>`, `<` or `<<`; `None` after `>&`, which names no file.
    fn redirected(&mut self) -> Option<Word> {
        while matches!(self.peek(), Some('>' | '<')) {
            self.at += 1;
        }
        let is_stream = self.peek() == Some('&');
        if is_stream {
            self.at += 1;
        }
        self.blanks();
        let word = self.word();
        (!is_stream && !word.0.is_empty()).then_some(word)
    }

    fn word(&mut self) -> Word {
        let mut word = Word::default();
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' | '\n' | ';' | '|' | '&' | '(' | ')' | '<' | '>' => break,
                '\'' => {
                    self.at += 1;
                    if word.0.is_empty() {
                        word.0.push(Part::Text(String::new()));
                    }
                    while let Some(c) = self.take().filter(|c| *c != '\'') {
                        word.push(c);
                    }
                }
                '"' => self.quoted(&mut word),
                '\\' => {
                    self.at += 1;
                    if let Some(c) = self.take() {
                        word.push(c);
                    }
                }
                '$' | '`' => self.expanded(&mut word),
                c => {
                    self.at += 1;
                    word.push(c);
                }
            }
        }
        word
    }

    /// Reads a text in double quotes, in which some characters are expanded.
    fn quoted(&mut self, word: &mut Word) {
        self.at += 1;
        if word.0.is_empty() {
            word.0.push(Part::Text(String::new()));
        }
        while let Some(c) = self.peek() {
            match c {
                '"' => {
                    self.at += 1;
                    return;
                }
                '$' | '`' => self.expanded(word),
                '\\' => {
                    self.at += 1;
                    match self.take() {
                        Some(c @ ('$' | '`' | '"' | '\\')) => word.push(c),
                        Some(c) => {
                            word.push('\\');
                            word.push(c);
                        }
                        None => {}
                    }
                }
                c => {
                    self.at += 1;
                    word.push(c);
                }
            }
        }
    }

    /// Reads an expansion that begins with `$` or a backquote.
    fn expanded(&mut self, word: &mut Word) {
        let begin = self.at;
        let opened = self.take();
        match (opened, self.peek()) {
            (Some('`'), _) => while self.take().is_some_and(|c| c != '`') {},
            (_, Some('(')) => self.enclosed('(', ')'),
            (_, Some('{')) => {
                self.enclosed('{', '}');
                let inner: String = self.line[begin + 2..self.at.saturating_sub(1).max(begin + 2)]
                    .iter()
                    .collect();
                if is_name(&inner) || inner.chars().all(|c| c.is_ascii_digit()) {
                    word.0.push(Part::Variable(inner));
                    return;
                }
            }
            (_, Some(c)) if c == '_' || c.is_ascii_alphanumeric() => {
                let mut name = String::new();
                while let Some(c) = self
                    .peek()
                    .filter(|c| *c == '_' || c.is_ascii_alphanumeric())
                {
                    self.at += 1;
                    name.push(c);
                    if name.starts_with(|c: char| c.is_ascii_digit()) {
                        break;
                    }
                }
                word.0.push(Part::Variable(name));
                return;
            }
            (_, Some('@' | '*' | '#' | '?' | '$' | '!')) => self.at += 1,
            _ => {
                word.push('$');
                return;
            }
        }
        let text = self.line[begin..self.at].iter().collect();
        word.0.push(Part::Other(text));
    }

    /// Skips past the end of the parenthesis or brace that opens here.
    fn enclosed(&mut self, open: char, close: char) {
        let mut depth = 0_usize;
        while let Some(c) = self.take() {
            if c == open {
                depth += 1;
            } else if c == close {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats the commands in `line` as written, with `<...>` around variables and `<<...>>` around the other
    /// parts that a shell would expand.
    fn shown(line: &str) -> Vec<String> {
        let word = |word: &Word| -> String {
            let part = |part: &Part| match part {
                Part::Text(text) => text.clone(),
                Part::Variable(name) => format!("<{name}>"),
                Part::Other(text) => format!("<<{text}>>"),
            };
            word.0.iter().map(part).collect()
        };
        let statement = |it: &Statement| {
            let words: Vec<_> = it.words.iter().map(word).collect();
            let to = it.to.as_ref().map(|to| format!(" > {}", word(to)));
            let not = if it.negated { "! " } else { "" };
            format!("{not}{}{}", words.join("|"), to.unwrap_or_default())
        };
        statements(line).iter().map(statement).collect()
    }

    #[test]
    fn words_are_those_of_a_shell() {
        for (line, expected) in [
            (
                "echo 'p f $arg1' > kprobe_events # why",
                &["echo|p f $arg1 > kprobe_events"][..],
            ),
            (
                r#"echo "p:\$x ${PLACE} $1" >>$file 2> /dev/null"#,
                &["echo|p:$x <PLACE> <1> > <file>"],
            ),
            (
                "(! printf \"%s\" \"$command\" >> \"$3\" ) 2>&1",
                &["! printf|%s|<command> > <3>"],
            ),
            (
                "if ! grep -q x y; then echo 1 >f; fi",
                &["! grep|-q|x|y", "echo|1 > f", "fi"],
            ),
            (
                "A=`grep -w x y | cut -f 1` B=0x$(f \"(\")",
                &["A=<<`grep -w x y | cut -f 1`>>|B=0x<<$(f \"(\")>>"],
            ),
            (
                r"echo p\ f\$x ${2%^*} $? $",
                &["echo|p f$x|<<${2%^*}>>|<<$?>>|$"],
            ),
            ("x=\"\" f '' && g || h", &["x=|f|", "g", "h"]),
            ("cat <<EOF >f", &["cat > f"]),
        ] {
            assert_eq!(shown(line), expected, "{line}");
        }
    }

    #[test]
    fn assignments_have_a_name() {
        let first = |line: &str| statements(line)[0].words[0].clone();
        let word = first("PLACE=${FUNCTION}+1");
        let (name, value) = word.assignment().unwrap();
        assert_eq!(name, "PLACE");
        assert_eq!(value.0[0], Part::Variable("FUNCTION".to_owned()));
        assert!(first("--x=1").assignment().is_none());
        assert!(first("echo x=1").assignment().is_none());
    }

    #[test]
    fn quotes_stay_open_over_the_end_of_a_line() {
        for (line, open) in [
            ("echo 'a", true),
            ("echo 'a\nb'", false),
            ("echo \"a\\\"", true),
            ("# don't", false),
            ("a#'b", true),
            ("echo it\\'s", false),
        ] {
            assert_eq!(is_open(line), open, "{line}");
        }
    }
}
