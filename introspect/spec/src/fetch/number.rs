//! Numbers in the kernel's notation for `kprobe_events` (`kstrtoul` and its relatives): decimal, hexadecimal
//! after `0x`, octal after `0`.

/// Splits the prefix off: returns the radix and the digits.
fn radix_of(text: &str) -> (u32, &str) {
    let hex = text
        .strip_prefix("0x")
        .or_else(|| text.strip_prefix("0X"))
        .filter(|digits| digits.starts_with(|c: char| c.is_ascii_hexdigit()));
    match hex {
        Some(digits) => (16, digits),
        None if text.starts_with('0') => (8, text),
        None => (10, text),
    }
}

/// Parses a number without a sign.
fn digits(text: &str, radix: u32, digits: &str) -> Option<u64> {
    // `from_str_radix` would accept a sign.
    if text.is_empty() || !digits.bytes().all(|b| char::from(b).is_digit(radix)) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

/// Parses all of `text`, with an optional `+`.
pub(super) fn unsigned(text: &str) -> Option<u64> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let (radix, found) = radix_of(text);
    digits(text, radix, found)
}

/// Parses all of `text` as decimal.
pub(super) fn decimal(text: &str) -> Option<u64> {
    digits(text, 10, text)
}

/// Parses all of `text`, with an optional sign.
pub(super) fn signed(text: &str) -> Option<i64> {
    match text.strip_prefix('-') {
        None => i64::try_from(unsigned(text)?).ok(),
        Some(text) => {
            let (radix, found) = radix_of(text);
            0_i64.checked_sub_unsigned(digits(text, radix, found)?)
        }
    }
}

/// Returns the number at the start of `text` and the rest, or `None` if `text` does not begin with a number. A
/// number that is too large becomes `u64::MAX`.
pub(super) fn leading(text: &str) -> Option<(u64, &str)> {
    let (radix, found) = radix_of(text);
    let end = found
        .find(|c: char| !c.is_digit(radix))
        .unwrap_or(found.len());
    let (number, rest) = found.split_at(end);
    (!number.is_empty()).then(|| (u64::from_str_radix(number, radix).unwrap_or(u64::MAX), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_the_kernel_reads_them() {
        for (text, wanted) in [
            ("0", Some(0)),
            ("10", Some(10)),
            ("010", Some(8)),
            ("08", None),
            ("0x1F", Some(31)),
            ("0X1f", Some(31)),
            ("+5", Some(5)),
            ("++5", None),
            ("-5", None),
            ("+-5", None),
            ("", None),
            ("+", None),
            ("0x", None),
            ("1x", None),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
        ] {
            assert_eq!(unsigned(text), wanted, "{text}");
        }
        for (text, wanted) in [
            ("-0x8000000000000000", Some(i64::MIN)),
            ("-0x8000000000000001", None),
            ("0x8000000000000000", None),
            ("-010", Some(-8)),
            ("-+1", None),
            ("--1", None),
            ("+1", Some(1)),
            ("-", None),
        ] {
            assert_eq!(signed(text), wanted, "{text}");
        }
        assert_eq!(decimal("010"), Some(10));
        assert_eq!(decimal("+1"), None);
        assert_eq!(leading("12@3"), Some((12, "@3")));
        assert_eq!(leading("0x1g"), Some((1, "g")));
        assert_eq!(leading("0x"), Some((0, "x")));
        assert_eq!(leading("08"), Some((0, "8")));
        assert_eq!(leading("@"), None);
    }
}
