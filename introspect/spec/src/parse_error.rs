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

impl ParseError {
    /// The text with a caret under the offending column, as two lines. Control characters other
    /// than tabs are shown as `?`, so the result is safe to print.
    #[must_use]
    pub fn render(&self, text: &str) -> String {
        let mut picture: String = text
            .chars()
            .map(|c| if c.is_control() && c != '\t' { '?' } else { c })
            .collect();
        picture.push('\n');
        // Tabs are repeated so that the caret lands under its column whatever their width.
        picture.extend(
            text.chars()
                .chain(std::iter::repeat(' '))
                .take(self.column.min(text.chars().count()))
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
