//! Patterns: one definition for many functions.
//!
//! Invariant: a pattern that was read is a valid glob, and consists of characters of symbol names, `*`, `?` and
//! closed sets `[...]`.

use globset::GlobBuilder;

use super::names::LONGEST_SYMBOL;
use crate::parse_error::{ParseError, error};

/// Returns whether `place` is meant as a pattern.
pub(crate) fn is_pattern(place: &str) -> bool {
    // The offset cannot contain a pattern.
    let name = place.split('+').next().unwrap_or_default();
    name.contains(['*', '?', '['])
}

/// Reads the pattern in `word`, which begins at `column`.
pub(crate) fn read_pattern(column: usize, word: &str) -> Result<String, ParseError> {
    if word.len() > LONGEST_SYMBOL {
        return error(
            column + LONGEST_SYMBOL,
            format!("pattern longer than {LONGEST_SYMBOL} characters"),
        );
    }
    let mut set = None;
    for (i, c) in word.char_indices() {
        match (c, set) {
            ('[', None) => set = Some(i),
            // `]` is a member if it is the first character of a set, or the first one after its negation.
            (']', Some(start)) if !matches!(&word[start + 1..i], "" | "!" | "^") => set = None,
            ('!' | '^' | '-' | ']', Some(_)) => {}
            ('*' | '?', None) => {}
            ('+' | '-', None) => {
                return error(
                    column + i,
                    "an offset belongs to one function: a pattern has none",
                );
            }
            (c, _) if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$') => {}
            (c, Some(_)) => {
                return error(
                    column + i,
                    format!("`{c}` cannot be part of a set of characters"),
                );
            }
            (c, None) => {
                return error(column + i, format!("`{c}` cannot be part of a pattern"));
            }
        }
    }
    if let Some(start) = set {
        return error(column + start, "missing `]` after `[`");
    }
    match GlobBuilder::new(word).build() {
        Ok(_) => Ok(word.to_owned()),
        Err(bad) => error(column, format!("bad pattern: {}", bad.kind())),
    }
}
