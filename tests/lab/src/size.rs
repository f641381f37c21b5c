//! Memory sizes as the user writes them.

/// Reads a size such as `512M`, `3G` or `2048` (MiB) and returns MiB.
pub(crate) fn mebibytes(text: &str) -> Result<u32, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 1024),
        _ => (text, 1),
    };
    digits
        .parse::<u32>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .filter(|size| (256..=1 << 20).contains(size))
        .ok_or_else(|| "give a size from 256M to 1024G, such as 1536M or 3G".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_their_unit() {
        assert_eq!(mebibytes("512M"), Ok(512));
        assert_eq!(mebibytes("3g"), Ok(3072));
        assert_eq!(mebibytes("2048"), Ok(2048));
    }

    #[test]
    fn absurd_sizes_are_refused() {
        for text in ["", "M", "1M", "9999999G", "-1G", "3T", "ä"] {
            assert!(mebibytes(text).is_err(), "{text}");
        }
    }
}
