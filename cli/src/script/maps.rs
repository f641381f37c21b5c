//! Maps of a script, in the format of bpftrace.
//!
//! Invariant: callers pass keys without control characters for a terminal.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hvprobe_spec::script::MapFunction;

use crate::output::histograms::bars::bar;

/// Part of a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KeyText {
    /// A number.
    Number(i128),
    /// Text in its printed form.
    Text(String),
}

/// Entries of a map by their keys.
#[derive(Debug, Default)]
pub(crate) struct Entries(BTreeMap<Vec<KeyText>, Entry>);

/// Results of hits with the same key.
#[derive(Debug, Default)]
struct Entry {
    hits: u64,
    value: Option<Summed>,
    /// Number of hits in each row. Rows are counted from 0.
    rows: BTreeMap<u64, u64>,
}

/// Count, sum and extremes of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Summed {
    pub(crate) count: u64,
    pub(crate) sum: i128,
    pub(crate) least: i128,
    pub(crate) greatest: i128,
}

impl Entries {
    /// Adds `hits` with this key.
    pub(crate) fn add_hits(&mut self, key: Vec<KeyText>, hits: u64) {
        self.0.entry(key).or_default().hits += hits;
    }

    /// Adds the sum of hits with this key.
    pub(crate) fn add_sum(&mut self, key: Vec<KeyText>, more: Summed) {
        let entry = self.0.entry(key).or_default();
        entry.value = Some(match entry.value {
            None => more,
            Some(value) => Summed {
                count: value.count.saturating_add(more.count),
                sum: value.sum.saturating_add(more.sum),
                least: value.least.min(more.least),
                greatest: value.greatest.max(more.greatest),
            },
        });
    }

    /// Adds `hits` with this key to `row`, counted from 0.
    pub(crate) fn add_row(&mut self, key: Vec<KeyText>, row: u64, hits: u64) {
        let entry = self.0.entry(key).or_default();
        entry.hits += hits;
        *entry.rows.entry(row).or_default() += hits;
    }

    /// Returns whether there are no entries.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Formats the map `name`, sorted by the printed number. If `top` is given, includes only this number of
    /// greatest entries.
    pub(crate) fn text(&self, name: &str, aggregate: MapFunction, top: Option<u64>) -> String {
        let mut entries: Vec<_> = self.0.iter().collect();
        entries.sort_by_key(|(_, entry)| entry.number(aggregate));
        let top = top.and_then(|top| usize::try_from(top).ok());
        let first = entries.len() - top.unwrap_or(entries.len()).min(entries.len());
        let mut text = String::new();
        for (key, entry) in &entries[first..] {
            let key = shown(name, key);
            match aggregate {
                MapFunction::Powers | MapFunction::Steps { .. } => {
                    let rows = rows(aggregate, &entry.rows);
                    writeln!(text, "{key}: \n{rows}")
                }
                _ => writeln!(text, "{key}: {}", entry.number(aggregate)),
            }
            .expect("writing to a string cannot fail");
        }
        if !matches!(aggregate, MapFunction::Powers | MapFunction::Steps { .. }) {
            text.push('\n');
        }
        text
    }
}

impl Entry {
    fn number(&self, aggregate: MapFunction) -> i128 {
        let value = |of: fn(Summed) -> i128| self.value.map_or(0, of);
        match aggregate {
            MapFunction::Hits | MapFunction::Powers | MapFunction::Steps { .. } => self.hits.into(),
            MapFunction::Sum => value(|it| it.sum),
            MapFunction::Average => value(|it| it.sum / i128::from(it.count.max(1))),
            MapFunction::Least => value(|it| it.least),
            MapFunction::Greatest => value(|it| it.greatest),
        }
    }
}

/// Returns `@NAME[KEY, KEY]`.
fn shown(name: &str, key: &[KeyText]) -> String {
    let parts = key.iter().map(|part| match part {
        KeyText::Number(number) => number.to_string(),
        KeyText::Text(text) => text.clone(),
    });
    match key.is_empty() {
        true => format!("@{name}"),
        false => format!("@{name}[{}]", parts.collect::<Vec<_>>().join(", ")),
    }
}

/// Returns the row, counted from 0, of numbers with `bits` significant bits. A value of `bits` above 64 stands for
/// negative numbers.
pub(crate) fn row_of_bits(bits: u64) -> u64 {
    match bits {
        0..=64 => bits + 1,
        _ => 0,
    }
}

/// Returns the row of `number`, counted from 0. The first row is for numbers below `min`, the last for those from
/// `max` on.
pub(crate) fn row_of_step(number: i128, (min, max, step): (u64, u64, u64)) -> u64 {
    let steps = (max - min) / step.max(1);
    match number - i128::from(min) {
        ..0 => 0,
        _ if number >= i128::from(max) => steps + 1,
        above => u64::try_from(above / i128::from(step.max(1))).unwrap_or(steps) + 1,
    }
}

/// Formats the rows from the first to the last one with hits.
fn rows(aggregate: MapFunction, hits: &BTreeMap<u64, u64>) -> String {
    let mut text = String::new();
    let (Some((first, _)), Some((last, _))) = (hits.first_key_value(), hits.last_key_value())
    else {
        return text;
    };
    let most = hits.values().copied().max().unwrap_or(1).max(1);
    for row in *first..=*last {
        let hits = hits.get(&row).copied().unwrap_or(0);
        let label = match aggregate {
            MapFunction::Steps { min, max, step } => step_label(row, min, max, step),
            _ => power_label(row),
        };
        let bar = bar(hits, most);
        writeln!(text, "{label:<16}{hits:>8} {bar}").expect("writing to a string cannot fail");
    }
    text
}

fn power_label(row: u64) -> String {
    match row {
        0 => "(..., 0)".to_owned(),
        1 => "[0]".to_owned(),
        2 => "[1]".to_owned(),
        _ => format!("[{}, {})", power(row - 2), power(row - 1)),
    }
}

/// Returns 2^`exponent` with a unit.
fn power(exponent: u64) -> String {
    let unit = ["", "K", "M", "G", "T", "P", "E"];
    let unit = usize::try_from(exponent / 10)
        .ok()
        .and_then(|at| unit.get(at));
    format!("{}{}", 1_u64 << (exponent % 10), unit.unwrap_or(&""))
}

fn step_label(row: u64, min: u64, max: u64, step: u64) -> String {
    let bound = |number: u64| match number {
        0 => "0".to_owned(),
        _ if !step.is_multiple_of(1024) => number.to_string(),
        _ if number.is_multiple_of(1 << 20) => format!("{}M", number >> 20),
        _ if number.is_multiple_of(1024) => format!("{}K", number >> 10),
        _ => number.to_string(),
    };
    let steps = (max - min) / step.max(1);
    match row {
        0 => format!("(..., {})", bound(min)),
        _ if row > steps => format!("[{}, ...)", bound(max)),
        _ => {
            let from = min + (row - 1) * step;
            format!("[{}, {})", bound(from), bound(from + step))
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn key(parts: &[&str]) -> Vec<KeyText> {
        let part = |part: &&str| match part.parse() {
            Ok(number) => KeyText::Number(number),
            Err(_) => KeyText::Text((*part).to_owned()),
        };
        parts.iter().map(part).collect()
    }

    #[test]
    fn entries_come_in_the_order_of_their_values() {
        let mut entries = Entries::default();
        for (comm, pid, hits) in [
            ("dd", "10", 7),
            ("cat", "9", 3),
            ("dd", "9", 3),
            ("dd", "10", 5),
        ] {
            entries.add_hits(key(&[comm, pid]), hits);
        }
        expect![[r#"
            @x[cat, 9]: 3
            @x[dd, 9]: 3
            @x[dd, 10]: 12

        "#]]
        .assert_eq(&entries.text("x", MapFunction::Hits, None));
        expect![[r#"
            @[dd, 10]: 12

        "#]]
        .assert_eq(&entries.text("", MapFunction::Hits, Some(1)));
    }

    #[test]
    fn a_map_without_keys_has_one_value() {
        let mut entries = Entries::default();
        for (sum, least) in [(-7, -5), (20, 3)] {
            let summed = Summed {
                count: 2,
                sum,
                least,
                greatest: sum,
            };
            entries.add_sum(key(&[]), summed);
        }
        for (aggregate, expected) in [
            (MapFunction::Sum, 13),
            (MapFunction::Average, 3),
            (MapFunction::Least, -5),
            (MapFunction::Greatest, 20),
        ] {
            assert_eq!(
                entries.text("n", aggregate, None),
                format!("@n: {expected}\n\n")
            );
        }
        assert_eq!(Entries::default().text("n", MapFunction::Hits, None), "\n");
    }

    #[test]
    fn powers_of_two_are_shown_from_the_first_to_the_last() {
        let mut entries = Entries::default();
        for (bits, hits) in [(u64::MAX, 1), (0, 2), (1, 3), (3, 4), (11, 8)] {
            entries.add_row(key(&["dd"]), row_of_bits(bits), hits);
        }
        entries.add_row(key(&["cat"]), row_of_bits(64), 1);
        expect![[r#"
            @[cat]: 
            [8E, 16E)              1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|

            @[dd]: 
            (..., 0)               1 |@@@@@@                                              |
            [0]                    2 |@@@@@@@@@@@@@                                       |
            [1]                    3 |@@@@@@@@@@@@@@@@@@@                                 |
            [2, 4)                 0 |                                                    |
            [4, 8)                 4 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
            [8, 16)                0 |                                                    |
            [16, 32)               0 |                                                    |
            [32, 64)               0 |                                                    |
            [64, 128)              0 |                                                    |
            [128, 256)             0 |                                                    |
            [256, 512)             0 |                                                    |
            [512, 1K)              0 |                                                    |
            [1K, 2K)               8 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|

        "#]]
        .assert_eq(&entries.text("", MapFunction::Powers, None));
    }

    #[test]
    fn steps_have_rows_for_what_is_less_and_more() {
        let steps = |min, max, step, numbers: &[i128]| {
            let mut entries = Entries::default();
            for number in numbers {
                entries.add_row(key(&[]), row_of_step(*number, (min, max, step)), 1);
            }
            entries.text("l", MapFunction::Steps { min, max, step }, None)
        };
        let numbers = [-5, 99, 100, 149, 199, 200, i128::from(u64::MAX)];
        expect![[r#"
            @l: 
            (..., 100)             2 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
            [100, 150)             2 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
            [150, 200)             1 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
            [200, ...)             2 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|

        "#]]
        .assert_eq(&steps(100, 200, 50, &numbers));
        expect![[r#"
            @l: 
            [0, 1M)                1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
            [1M, 2M)               1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
            [2M, 3M)               0 |                                                    |
            [3M, 4M)               0 |                                                    |
            [4M, ...)              1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|

        "#]]
        .assert_eq(&steps(0, 4 << 20, 1 << 20, &[0, 1 << 20, 1 << 30]));
    }
}
