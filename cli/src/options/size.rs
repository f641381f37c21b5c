//! Memory sizes as they are typed.

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
}
