//! Memory sizes in notation for people.

/// Formats `bytes` in the largest unit that gives a whole number.
pub(crate) fn text(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (name, shift) in units {
        if bytes >> shift > 0 && bytes.trailing_zeros() >= shift {
            return format!("{} {name}", bytes >> shift);
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_printed_in_the_largest_whole_unit() {
        for (bytes, expected) in [
            (0, "0 bytes"),
            (1000, "1000 bytes"),
            (256 << 20, "256 MiB"),
            (1536 << 20, "1536 MiB"),
            (4 << 30, "4 GiB"),
        ] {
            assert_eq!(text(bytes), expected);
        }
    }
}
