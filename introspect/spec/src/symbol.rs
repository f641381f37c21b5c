//! Characters of symbols' names.

/// Returns the length of the symbol name at the start of `word`. A name consists of letters, digits, `_`, `.` and
/// `$`, and does not begin with a digit.
pub(crate) fn symbol_length(word: &str) -> usize {
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        return 0;
    }
    word.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$')))
        .unwrap_or(word.len())
}
