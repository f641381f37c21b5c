//! Parser for the limits of a budget.

use crate::parse_error::{ParseError, error};

/// Parses a number of hits per second, as in `1000/s`.
///
/// # Errors
/// Returns the column and the reason.
pub fn rate(text: &str) -> Result<u32, ParseError> {
    match number(text, "/s") {
        Ok(rate @ 1..) => Ok(rate),
        Ok(_) | Err(_) => error(
            beside_number(text, "/s"),
            format!(
                "write a number of hits per second from 1 to {}, as in 1000/s",
                u32::MAX
            ),
        ),
    }
}

/// Parses a share of the time in per cent, as in `5%`.
///
/// # Errors
/// Returns the column and the reason.
pub fn share(text: &str) -> Result<u8, ParseError> {
    match number(text, "%") {
        Ok(percent @ 1..=100) => Ok(percent),
        Ok(_) | Err(_) => error(
            beside_number(text, "%"),
            "write a whole number of per cent from 1 to 100, as in 5%",
        ),
    }
}

fn number<T: std::str::FromStr>(text: &str, unit: &str) -> Result<T, T::Err> {
    text.strip_suffix(unit).unwrap_or(text).parse()
}

/// Returns the column of the first character of `text` that is no digit of the number, or 0 if there is none.
fn beside_number(text: &str, unit: &str) -> usize {
    let number = text.strip_suffix(unit).unwrap_or(text);
    let strange = number.chars().position(|c| !c.is_ascii_digit());
    strange.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_numbers_with_or_without_their_unit() {
        assert_eq!((rate("1000/s"), rate("7")), (Ok(1000), Ok(7)));
        assert_eq!((share("5%"), share("100")), (Ok(5), Ok(100)));
    }

    #[test]
    fn limits_that_mean_nothing_are_refused_where_they_are_wrong() {
        for (text, column) in [
            ("0", 0),
            ("5/min", 1),
            ("", 0),
            ("4294967296", 0),
            ("a/s", 0),
        ] {
            let error = rate(text).expect_err(text);
            assert_eq!(error.column, column, "{text}");
            assert!(error.message.contains("from 1 to 4294967295"), "{error}");
        }
        for (text, column) in [("101%", 0), ("0.5%", 1), ("0", 0), ("5 %", 1), ("300", 0)] {
            let error = share(text).expect_err(text);
            assert_eq!(error.column, column, "{text}");
            assert!(error.message.contains("from 1 to 100"), "{error}");
        }
    }
}
