//! What can be part of a symbol's name.

/// How many characters of `word` make a symbol name: letters, digits, `_`, `.`, `$`, no digit
/// first.
pub(crate) fn symbol_length(word: &str) -> usize {
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        return 0;
    }
    word.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$')))
        .unwrap_or(word.len())
}
