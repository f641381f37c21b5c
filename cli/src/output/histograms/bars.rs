//! Histograms as bars.
//!
//! Entries that differ only in their last key form a group, sorted by that key if it is a range. In each group the
//! entry with the most hits has the longest bar.

use std::fmt::Write as _;

use hvprobe_proto::v1::{
    HistogramEntry, HistogramForm, HistogramKeyValue, histogram_key_value::What,
};

use super::key::shown;
use super::schema::{Key, Schema};
use crate::output::values::names::Names;

/// Length of the longest bar.
const LONGEST: u8 = 52;

/// Returns the bar for `hits`, padded to the length of the bar for `most` hits.
pub(crate) fn bar(hits: u64, most: u64) -> String {
    let length = u128::from(hits) * u128::from(LONGEST) / u128::from(most);
    let bar = "@".repeat(usize::try_from(length).unwrap_or(0));
    format!("|{bar:<longest$}|", longest = LONGEST.into())
}

/// Returns `entries` with their bars.
pub(super) fn text(schema: &Schema, entries: &[HistogramEntry], names: &Names) -> String {
    let Some((last, first)) = schema.keys.split_last() else {
        return String::new();
    };
    let mut text = String::new();
    for (heading, mut group) in groups(first, entries, names) {
        if !heading.is_empty() {
            writeln!(text, "{heading}").expect("writing to a string cannot fail");
        }
        if is_range(last) {
            // The bucket of negative numbers has the greatest number as its key, but comes first.
            let place = |number: u64| match last.form {
                HistogramForm::Bits => number.wrapping_add(1),
                _ => number,
            };
            group.sort_by_key(|entry| entry.keys.last().and_then(number).map(place));
        }
        let rows = group.iter().map(|entry| {
            let label = entry.keys.last().map(|key| label(last, key, entry, names));
            (label.unwrap_or_default(), entry.hits)
        });
        let rows: Vec<_> = rows.collect();
        let width = rows.iter().map(|(label, _)| label.chars().count()).max();
        let most = rows.iter().map(|(_, hits)| *hits).max().unwrap_or(1).max(1);
        for (label, hits) in rows {
            let (width, bar) = (width.unwrap_or(0), bar(hits, most));
            writeln!(text, "{label:<width$} {hits:>10} {bar}")
                .expect("writing to a string cannot fail");
        }
    }
    text
}

/// Groups the entries by the keys `first`, in the order of each group's first entry.
fn groups<'e>(
    first: &[Key],
    entries: &'e [HistogramEntry],
    names: &Names,
) -> Vec<(String, Vec<&'e HistogramEntry>)> {
    let mut groups: Vec<(String, Vec<&HistogramEntry>)> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for entry in entries {
        let keys = first.iter().zip(&entry.keys).map(|(key, value)| {
            let shown = shown(key, value, &entry.comm, names);
            format!("{}: {shown}", key.name)
        });
        let heading = keys.collect::<Vec<_>>().join(", ");
        let place = *places.entry(heading.clone()).or_insert(groups.len());
        match groups.get_mut(place) {
            Some((_, group)) => group.push(entry),
            None => groups.push((heading, vec![entry])),
        }
    }
    groups
}

fn is_range(key: &Key) -> bool {
    matches!(
        key.form,
        HistogramForm::Log2 | HistogramForm::Bits | HistogramForm::Buckets
    )
}

fn number(value: &HistogramKeyValue) -> Option<u64> {
    match value.what {
        Some(What::Number(number)) => Some(number),
        _ => None,
    }
}

/// Returns the label of an entry's last key: a range as its first and last number.
fn label(key: &Key, value: &HistogramKeyValue, entry: &HistogramEntry, names: &Names) -> String {
    let range = match (key.form, number(value)) {
        (HistogramForm::Log2, Some(0)) => Some((0, 1)),
        (HistogramForm::Log2, Some(power)) => {
            let bound = |power: u64| {
                u32::try_from(power)
                    .ok()
                    .and_then(|it| 1_u64.checked_shl(it))
            };
            let below = bound(power - 1);
            below.map(|below| (below + 1, bound(power).unwrap_or(u64::MAX)))
        }
        (HistogramForm::Bits, Some(0)) => Some((0, 0)),
        (HistogramForm::Bits, Some(bits @ 1..=64)) => {
            let first = 1_u64 << (bits - 1);
            Some((first, first | (first - 1)))
        }
        (HistogramForm::Buckets, Some(first)) => {
            Some((first, first.saturating_add(key.width.saturating_sub(1))))
        }
        _ => None,
    };
    match range {
        Some((first, last)) => format!("[{first}, {last}]"),
        None => shown(key, value, &entry.comm, names),
    }
}
