//! Versions of kernels, as they are in names of files.

use std::cmp::Ordering;

/// Characters between the parts of a version.
const SEPARATORS: [char; 5] = ['.', '-', '+', '_', '~'];

/// Compares versions by their numbers and words from left to right, so that 6.12 is greater than 6.1. A version
/// is greater than its own prefixes, but a release candidate is less than its release.
pub(super) fn compare(one: &str, other: &str) -> Ordering {
    parts(one).cmp(&parts(other))
}

/// Part of a version, in the order in which parts sort.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part<'a> {
    /// What follows precedes the release: `rc` or `~`.
    Before,
    End,
    Word(&'a str),
    Number(u64),
}

fn parts(version: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    for piece in version.split_inclusive(SEPARATORS) {
        let mut rest = piece.trim_end_matches(SEPARATORS);
        while let Some(first) = rest.chars().next() {
            let digits = first.is_ascii_digit();
            let end = rest
                .find(|c: char| c.is_ascii_digit() != digits)
                .unwrap_or(rest.len());
            let (part, after) = rest.split_at(end);
            parts.push(match part {
                "rc" => Part::Before,
                part => part.parse().map_or(Part::Word(part), Part::Number),
            });
            rest = after;
        }
        if piece.ends_with('~') {
            parts.push(Part::Before);
        }
    }
    parts.push(Part::End);
    parts
}

/// Returns whether `wanted` is the version `version`, or its beginning up to a separator: `6.1` is the beginning of
/// `6.1.0-9-amd64`, and not of `6.12.1`.
pub(super) fn is_of(wanted: &str, version: &str) -> bool {
    version.strip_prefix(wanted).is_some_and(|rest| {
        let next = rest.chars().next();
        next.is_none_or(|next| SEPARATORS.contains(&next))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let in_order = [
            "5.10.0-32-amd64",
            "6.1.0-9-amd64",
            "6.1.0-48-amd64",
            "6.1.0-48-cloud-amd64",
            "6.12.107+deb13-amd64",
            "7.2.13+deb14-cloud-amd64",
        ];
        assert!(in_order.is_sorted_by(|one, other| compare(one, other) == Ordering::Less));
        assert_eq!(compare("6.1.0", "6.1.0"), Ordering::Equal);
        for (one, other) in [
            ("6.1-rc7", "6.1.1"),
            ("6.12.0-rc7", "6.12.0"),
            ("6.12.0-rc1", "6.12.0-rc7"),
            ("6.12.0-rc1-amd64", "6.12.0-amd64"),
            ("6.12~rc6-amd64", "6.12-amd64"),
            ("6.12.0", "6.12.0-1-amd64"),
        ] {
            assert_eq!(compare(one, other), Ordering::Less, "{one} {other}");
            assert_eq!(compare(other, one), Ordering::Greater, "{one} {other}");
        }
    }

    #[test]
    fn a_version_stands_for_those_that_begin_with_it() {
        for (wanted, is_one) in [
            ("6.1", true),
            ("6.1.0", true),
            ("6.1.0-9-amd64", true),
            ("6.1.0-9", true),
            ("6", true),
            ("6.1.0-9-amd", false),
            ("6.1.0-9-amd64-x", false),
            ("1.0", false),
            ("6.", false),
        ] {
            assert_eq!(is_of(wanted, "6.1.0-9-amd64"), is_one, "{wanted}");
        }
        assert!(!is_of("6.1", "6.12.1"));
    }
}
