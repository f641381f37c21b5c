//! Notation of numbers in definitions and all other texts.

use crate::parse_error::{ParseError, error};

/// Returns what follows the `0x` or `0X` at the start of `word`.
pub(crate) fn strip_hex(word: &str) -> Option<&str> {
    word.strip_prefix("0x").or_else(|| word.strip_prefix("0X"))
}

/// Parses `word`, which begins at `column`, as a decimal or 0x number. `what` names the number in messages, and
/// `missing` makes the message about a word without digits.
pub(crate) fn number_in(
    column: usize,
    word: &str,
    what: &str,
    missing: impl FnOnce() -> String,
) -> Result<u64, ParseError> {
    let (digits, radix) = match strip_hex(word) {
        Some(digits) => (digits, 16),
        None => (word, 10),
    };
    let at = column + word.len() - digits.len();
    if digits.is_empty() {
        return error(at, missing());
    }
    if let Some((i, c)) = digits.char_indices().find(|(_, c)| !c.is_digit(radix)) {
        return error(at + i, format!("`{c}` is no digit of the {what}"));
    }
    if radix == 10 && digits.len() > 1 && digits.starts_with('0') {
        // The kernel reads this as octal, most people as decimal.
        return error(
            column,
            format!("leading zero in the {what}: write decimal, or hex after 0x"),
        );
    }
    u64::from_str_radix(digits, radix)
        .or_else(|_| error(column, format!("the {what} does not fit 64 bits")))
}
