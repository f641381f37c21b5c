//! GRUB's environment block, the file `grubenv`, where it keeps variables between boots.

const SIGNATURE: &str = "# GRUB Environment Block\n";

/// Returns the variables in the content of the file, in its order.
pub(super) fn variables(content: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(content);
    let Some(mut rest) = text.strip_prefix(SIGNATURE) else {
        return Vec::new();
    };
    let mut variables = Vec::new();
    while let Some((line, after)) = split_line(rest) {
        rest = after;
        if line.starts_with('#') {
            continue;
        }
        if let Some((name, value)) = line.split_once('=') {
            variables.push((name.to_owned(), unescaped(value)));
        }
    }
    variables
}

/// Splits off a line, which may have escaped line feeds.
fn split_line(text: &str) -> Option<(&str, &str)> {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'\\' => escaped = !escaped,
            b'\n' if !escaped => {
                return text
                    .split_at_checked(at)
                    .map(|(line, _)| (line, text.get(at + 1..).unwrap_or_default()));
            }
            _ => escaped = false,
        }
    }
    None
}

fn unescaped(value: &str) -> String {
    let mut chars = value.chars();
    let mut text = String::new();
    while let Some(c) = chars.next() {
        match c {
            '\\' => text.extend(chars.next()),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_read_as_grub_writes_them() {
        let block = b"# GRUB Environment Block\n# WARNING: Do not edit\nsaved_entry=a-6.1\nkernelopts=root=UUID=1 ro \nodd=a\\\\b\\\nc\nempty=\n#####";
        let found = variables(block);
        let found: Vec<_> = found
            .iter()
            .map(|(a, b)| (a.as_str(), b.as_str()))
            .collect();
        assert_eq!(
            found,
            [
                ("saved_entry", "a-6.1"),
                ("kernelopts", "root=UUID=1 ro "),
                ("odd", "a\\b\nc"),
                ("empty", ""),
            ]
        );
        assert_eq!(variables(b"saved_entry=a\n"), []);
    }
}
