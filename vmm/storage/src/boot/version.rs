//! Order of versions (UAPI group, "Version Format Specification").

use std::cmp::Ordering;

/// Compares two versions. Characters that versions cannot have separate their parts.
pub(super) fn compare(one: &str, other: &str) -> Ordering {
    let (mut a, mut b) = (one.as_bytes(), other.as_bytes());
    loop {
        (a, b) = (
            skip(a, |byte| !is_valid(byte)),
            skip(b, |byte| !is_valid(byte)),
        );
        // A version before a release: lower even than the end.
        if let Some(order) = separator(&mut a, &mut b, b'~') {
            return order;
        }
        if a.is_empty() || b.is_empty() {
            return a.len().min(1).cmp(&b.len().min(1));
        }
        for byte in [b'-', b'^', b'.'] {
            if let Some(order) = separator(&mut a, &mut b, byte) {
                return order;
            }
        }
        let starts_with_digit = |it: &[u8]| it.first().is_some_and(u8::is_ascii_digit);
        let order = if starts_with_digit(a) || starts_with_digit(b) {
            let (x, y) = (
                take(&mut a, u8::is_ascii_digit),
                take(&mut b, u8::is_ascii_digit),
            );
            let present = (!x.is_empty()).cmp(&!y.is_empty());
            let (x, y) = (skip(x, |byte| byte == b'0'), skip(y, |byte| byte == b'0'));
            present.then(x.len().cmp(&y.len())).then(x.cmp(y))
        } else {
            let (x, y) = (
                take(&mut a, u8::is_ascii_alphabetic),
                take(&mut b, u8::is_ascii_alphabetic),
            );
            // Compares the common length first, then the lengths, as slices do.
            x.cmp(y)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

fn is_valid(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'~' | b'-' | b'^' | b'.')
}

/// If either begins with `byte`, returns their order if only one does, which is lower, or skips it in both.
fn separator(a: &mut &[u8], b: &mut &[u8], byte: u8) -> Option<Ordering> {
    match (a.strip_prefix(&[byte]), b.strip_prefix(&[byte])) {
        (None, None) => None,
        (Some(_), None) => Some(Ordering::Less),
        (None, Some(_)) => Some(Ordering::Greater),
        (Some(x), Some(y)) => {
            (*a, *b) = (x, y);
            None
        }
    }
}

fn skip(text: &[u8], unwanted: impl Fn(u8) -> bool) -> &[u8] {
    let start = text.iter().position(|byte| !unwanted(*byte));
    start
        .and_then(|start| text.get(start..))
        .unwrap_or_default()
}

/// Splits off the longest prefix of bytes that are `wanted`.
fn take<'a>(text: &mut &'a [u8], wanted: impl Fn(&u8) -> bool) -> &'a [u8] {
    let end = text.iter().position(|byte| !wanted(byte));
    let (taken, rest) = text.split_at(end.unwrap_or(text.len()));
    *text = rest;
    taken
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn versions_have_the_order_of_the_specification() {
        // From the specification, and kernels.
        let ascending = [
            "~1",
            "",
            "ab",
            "abb",
            "abc",
            "0001",
            "002",
            "12",
            "122",
            "122.9",
            "123~rc1",
            "123",
            "123-a",
            "123-a.1",
            "123-a1",
            "123-a1.1",
            "123-3",
            "123-3.1",
            "123^patch1",
            "123^1",
            "123.a-1",
            "123.1-1",
            "123a-1",
            "124",
        ];
        for (n, lower) in ascending.iter().enumerate() {
            for higher in &ascending[n + 1..] {
                assert_eq!(compare(lower, higher), Ordering::Less, "{lower} {higher}");
                assert_eq!(
                    compare(higher, lower),
                    Ordering::Greater,
                    "{lower} {higher}"
                );
            }
        }
        let kernels = [
            "6.1.0-9-amd64",
            "6.1.0-18-amd64",
            "6.1.0-100-amd64",
            "6.10.0-1-amd64",
        ];
        assert!(kernels.is_sorted_by(|a, b| compare(a, b).is_lt()));
        assert_eq!(compare("1_2", "1+2"), Ordering::Equal);
    }

    proptest! {
        #[test]
        fn the_order_is_one(a in "[a1~.^+-]{0,6}", b in "[a1~.^+-]{0,6}", c in "[a1~.^+-]{0,6}") {
            prop_assert_eq!(compare(&a, &a), Ordering::Equal);
            prop_assert_eq!(compare(&a, &b), compare(&b, &a).reverse());
            if compare(&a, &b).is_le() && compare(&b, &c).is_le() {
                prop_assert!(compare(&a, &c).is_le(), "{} {} {}", a, b, c);
            }
        }
    }
}
