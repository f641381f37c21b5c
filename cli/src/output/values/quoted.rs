//! Texts of the guest in quotes.
//!
//! Invariant: the quoted text contains no control characters for a terminal and preserves every byte.

use std::fmt::Write as _;

/// Returns `bytes` in double quotes.
pub(crate) fn string(bytes: &[u8]) -> String {
    let mut text = String::from('"');
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\'' => text.push(c),
                c => escape(&mut text, c),
            }
        }
        for byte in chunk.invalid() {
            number(&mut text, *byte);
        }
    }
    text.push('"');
    text
}

/// Returns `byte` in single quotes.
pub(crate) fn character(byte: u8) -> String {
    let mut text = String::from('\'');
    match char::from(byte) {
        '"' => text.push('"'),
        c if c.is_ascii() => escape(&mut text, c),
        _ => number(&mut text, byte),
    }
    text.push('\'');
    text
}

/// Appends `c` with C's escapes.
fn escape(text: &mut String, c: char) {
    match u8::try_from(c) {
        Ok(byte) if byte.is_ascii_control() && !b"\0\t\n\r".contains(&byte) => number(text, byte),
        _ => text.extend(c.escape_debug()),
    }
}

fn number(text: &mut String, byte: u8) {
    write!(text, "\\x{byte:02x}").expect("writing to a string cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_between_quotes_steers_a_terminal() {
        for (bytes, shown) in [
            (&b"/etc/passwd"[..], r#""/etc/passwd""#),
            (b"", r#""""#),
            (br#"it's "x" \ y"#, r#""it's \"x\" \\ y""#),
            (b"a\tb\r\n\0", r#""a\tb\r\n\0""#),
            (b"\x1b[2J\x07\x7f", r#""\x1b[2J\x07\x7f""#),
            ("\u{9b}31m\u{202e}x".as_bytes(), r#""\u{9b}31m\u{202e}x""#),
            ("grün €".as_bytes(), "\"grün €\""),
            (b"a\xff\xe2\x82b", r#""a\xff\xe2\x82b""#),
        ] {
            assert_eq!(string(bytes), shown);
        }
    }

    #[test]
    fn characters_are_shown_as_c_writes_them() {
        let shown = [b'a', b' ', b'\'', b'"', b'\\', b'\n', 0, 0x80, 0xff].map(character);
        let expected = [
            "'a'", "' '", r"'\''", "'\"'", r"'\\'", r"'\n'", r"'\0'", r"'\x80'", r"'\xff'",
        ];
        assert_eq!(shown, expected);
        assert_eq!(character(0x1b), r"'\x1b'");
    }
}
