//! Quoting for the POSIX shell scripts that carry commands into a rig.

/// Appends `word` to `script`, quoted so that a shell reads exactly its bytes as one word.
pub(crate) fn quote_into(script: &mut Vec<u8>, word: &[u8]) {
    script.push(b'\'');
    for &byte in word {
        match byte {
            // Inside single quotes nothing can be escaped. So close the quotes, add an escaped quote, and open them
            // again.
            b'\'' => script.extend_from_slice(br"'\''"),
            _ => script.push(byte),
        }
    }
    script.push(b'\'');
}

/// Appends a line that calls `command` (not quoted) with `words` as its arguments.
pub(crate) fn line_into<'a>(
    script: &mut Vec<u8>,
    command: &str,
    words: impl IntoIterator<Item = &'a [u8]>,
) {
    script.extend_from_slice(command.as_bytes());
    for word in words {
        script.push(b' ');
        quote_into(script, word);
    }
    script.push(b'\n');
}

/// Appends a line that exports `name` with `value`.
pub(crate) fn export_into(script: &mut Vec<u8>, name: &str, value: &[u8]) {
    script.extend_from_slice(format!("export {name}=").as_bytes());
    quote_into(script, value);
    script.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::process::Command;

    /// Returns the words as a shell reads them after quoting. Each is followed by a NUL.
    fn through_a_shell(words: &[&[u8]]) -> Vec<u8> {
        let mut script = Vec::new();
        line_into(&mut script, r"printf '%s\000'", words.iter().copied());
        Command::new("sh")
            .arg("-c")
            .arg(OsStr::from_bytes(&script))
            .output()
            .unwrap()
            .stdout
    }

    #[test]
    fn awkward_words_pass_through_a_shell_unchanged() {
        let words: [&[u8]; 8] = [
            b"plain",
            b"",
            b"it's",
            b"''\\''",
            b"two\nlines\n",
            "grüße 🦀".as_bytes(),
            b"$HOME `id` \\ \" * ~ # ; & |",
            b"\xff\xfe",
        ];
        let mut expected = Vec::new();
        for word in words {
            expected.extend_from_slice(word);
            expected.push(0);
        }
        assert_eq!(through_a_shell(&words), expected);
    }

    #[test]
    fn export_quotes_its_value() {
        let mut script = Vec::new();
        export_into(&mut script, "A", b"b c");
        assert_eq!(script, b"export A='b c'\n");
    }
}
