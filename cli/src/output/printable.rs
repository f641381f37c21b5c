//! Foreign text without control characters for a terminal.

/// Returns `raw` as text without control characters for a terminal: each character that is not printable
/// becomes `?`.
pub(crate) fn harmless(raw: &[u8]) -> String {
    String::from_utf8_lossy(raw)
        .chars()
        .map(|c| match c {
            char::REPLACEMENT_CHARACTER => '?',
            c if c.is_control() => '?',
            c => c,
        })
        .collect()
}

/// Returns `raw` as text without control characters for a terminal, like [`harmless`]. But different inputs give
/// different texts, as the keys of histograms need. Each byte of a control character or of invalid UTF-8 is written
/// in octal, as `\001`, and backslashes are doubled.
pub(crate) fn escaped(raw: &[u8]) -> String {
    let mut text = String::with_capacity(raw.len());
    for chunk in raw.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                c if c.is_control() => escape(&mut text, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => text.push(c),
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

fn escape(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        text.push('\\');
        text.extend([6, 3, 0].map(|above| char::from(b'0' + (byte >> above & 7))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_and_broken_text_become_question_marks() {
        assert_eq!(harmless(b"ls"), "ls");
        assert_eq!(harmless(b"\x1b[2Jx\n"), "?[2Jx?");
        assert_eq!(harmless(b"a\xffb"), "a?b");
        assert_eq!(harmless("\u{9b}31m".as_bytes()), "?31m");
    }

    #[test]
    fn keys_of_counts_are_printed_by_their_bytes() {
        assert_eq!(escaped(b"ls"), "ls");
        assert_eq!(escaped(b"\x1b[2Jx\n"), "\\033[2Jx\\012");
        assert_eq!(escaped(b"a\xffb\xc3"), "a\\377b\\303");
        assert_eq!(escaped("\u{9b}31m".as_bytes()), "\\302\\23331m");
        assert_eq!(escaped("\\012 \u{fffd}?".as_bytes()), "\\\\012 \u{fffd}?");
    }

    #[test]
    fn texts_that_differ_look_different() {
        let mut seen = std::collections::BTreeMap::new();
        let bytes = 0..=u8::MAX;
        let pairs = bytes
            .clone()
            .flat_map(|one| bytes.clone().map(move |other| vec![one, other]));
        for raw in bytes.clone().map(|one| vec![one]).chain(pairs) {
            let text = escaped(&raw);
            assert!(!text.chars().any(char::is_control), "{raw:x?}");
            assert_eq!(seen.insert(text, raw.clone()), None, "{raw:x?}");
        }
    }
}
