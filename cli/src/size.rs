//! Memory sizes in notation for people.

use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

/// Reason why a size is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadSize {
    #[error("write a whole number and K, M, G or T, as in 512M")]
    Form,
    #[error("that is more than 64 bits can count")]
    TooLarge,
}

impl FromStr for Size {
    type Err = BadSize;

    fn from_str(text: &str) -> Result<Self, BadSize> {
        let digits = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, suffix) = text.split_at(digits);
        if number.is_empty() {
            return Err(BadSize::Form);
        }
        let unit: u64 = match suffix {
            "K" | "k" | "KiB" => 1 << 10,
            "" | "M" | "m" | "MiB" => 1 << 20,
            "G" | "g" | "GiB" => 1 << 30,
            "T" | "t" | "TiB" => 1 << 40,
            _ => return Err(BadSize::Form),
        };
        let number: u64 = number.parse().map_err(|_| BadSize::TooLarge)?;
        number.checked_mul(unit).map(Self).ok_or(BadSize::TooLarge)
    }
}

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
    fn suffixes_are_powers_of_1024_and_none_means_mebibytes() {
        for (text, bytes) in [
            ("64", 64 << 20),
            ("64K", 64 << 10),
            ("64m", 64 << 20),
            ("2G", 2 << 30),
            ("2GiB", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "M", "-1M", "1.5G", "12Q", "0x10M", " 1M", "1 M"] {
            assert_eq!(text.parse::<Size>(), Err(BadSize::Form), "{text:?}");
        }
        for text in ["99999999999999999999", "99999999T"] {
            assert_eq!(text.parse::<Size>(), Err(BadSize::TooLarge), "{text:?}");
        }
    }

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
