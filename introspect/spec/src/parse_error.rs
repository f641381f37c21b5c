//! Why a text is refused, with the column.

/// Why a text is refused, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ParseError {
    /// The column the message is about, in characters from 0; the length of the text if something
    /// is missing at its end.
    pub column: usize,
    /// What is wrong there, and what to do.
    pub message: String,
}

/// The longest text that is shown as a whole, and how much is shown before and behind the column of a longer one, in
/// characters.
const LONGEST: usize = 1024;
const AROUND: usize = 100;

impl ParseError {
    /// The text with a caret under the offending column, as two lines; of a long one what is around that. Control
    /// characters other than tabs are shown as `?`, so the result is safe to print.
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
        let mut picture: String = shown()
            .map(|c| if c.is_control() && c != '\t' { '?' } else { c })
            .collect();
        picture.push_str(if last < length { "…\n" } else { "\n" });
        // Tabs are repeated so that the caret lands under its column whatever their width.
        picture.extend(
            shown()
                .take(before.chars().count() + column - first)
                .map(|c| if c == '\t' { '\t' } else { ' ' }),
        );
        picture.push('^');
        picture
    }
}

/// Refuses a text.
pub(crate) fn error<T>(column: usize, message: impl Into<String>) -> Result<T, ParseError> {
    Err(ParseError {
        column,
        message: message.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_text_what_is_around_the_column_is_shown() {
        let text = format!("{}\t!{}", "a".repeat(5000), "b".repeat(100_000));
        let error = ParseError {
            column: 5001,
            message: String::new(),
        };
        let picture = error.render(&text);
        let (shown, caret) = picture.split_once('\n').unwrap();
        let expected = format!("…{}\t!{}…", "a".repeat(99), "b".repeat(99));
        assert_eq!(shown, expected);
        assert_eq!(caret, format!("{}\t^", " ".repeat(100)));
    }
}
