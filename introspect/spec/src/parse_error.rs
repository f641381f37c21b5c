//! Errors in texts, with their columns.

/// Error in a text, with its column.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ParseError {
    /// Column of the error, in characters from 0; the length of the text if something is missing at its end.
    pub column: usize,
    /// The mistake, and how to correct it.
    pub message: String,
}

/// Maximum length of a text that is shown whole, and the number of characters that are shown on each side of
/// the column of a longer text.
const LONGEST: usize = 1024;
const AROUND: usize = 100;

impl ParseError {
    /// Returns two lines: the text, or of a long text the part around the column, and a caret under the column.
    /// Control characters other than tabs become `?`, so the result is safe to print.
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
        // Tabs are repeated, so that the caret is under its column whatever the width of a tab.
        picture.extend(
            shown()
                .take(before.chars().count() + column - first)
                .map(|c| if c == '\t' { '\t' } else { ' ' }),
        );
        picture.push('^');
        picture
    }
}

/// Returns an error in a text.
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
