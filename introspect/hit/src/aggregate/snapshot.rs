//! Content of a histogram at one moment.

use std::cmp::Ordering;

use hvprobe_spec::histogram::{By, Order, ValueForm};

use super::key::KeyValue;

/// Sum of one field over the hits of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// Number of hits at which the field could be read.
    pub count: u64,
    /// The sum.
    pub sum: i128,
    /// The least value; 0 if there is none.
    pub least: i128,
    /// The greatest value; 0 if there is none.
    pub greatest: i128,
}

impl Sum {
    pub(super) fn add(&mut self, value: i128) {
        let first = self.count == 0;
        self.least = if first { value } else { self.least.min(value) };
        self.greatest = if first {
            value
        } else {
            self.greatest.max(value)
        };
        // Far fewer 64-bit values are added than it takes to overflow 128 bits.
        self.sum = self.sum.saturating_add(value);
        self.count += 1;
    }

    /// Returns the number that `form` asks for.
    #[must_use]
    pub fn in_form(&self, form: ValueForm) -> i128 {
        match form {
            ValueForm::Sum | ValueForm::Hex => self.sum,
            ValueForm::Average => self.sum / i128::from(self.count.max(1)),
            ValueForm::Least => self.least,
            ValueForm::Greatest => self.greatest,
        }
    }
}

/// An entry of a histogram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What the entry's hits have in common, in the order of the keys.
    pub keys: Vec<KeyValue>,
    /// Number of hits.
    pub hits: u64,
    /// The sums, in the order of the values.
    pub sums: Vec<Sum>,
    /// Name of the task of the first hit, NUL-padded, if it was known.
    pub comm: Option<[u8; 16]>,
}

/// A histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Entries in the requested order. Entries that are equal in this order are sorted by their keys.
    pub rows: Vec<Row>,
    /// Number of hits that were counted.
    pub hits: u64,
    /// Number of hits that were not counted, because there was no room for another entry.
    pub dropped: u64,
    /// Number of events that could not be counted: events of the whole machine that were lost, and events for which
    /// the histogram's filter could not be decided.
    pub lost: u64,
}

/// Sorts `rows` by the `asked` orders, and then by the keys. `signed` says for each key whether it is a signed
/// number; `forms` says for each value in which form it is shown.
pub(super) fn sort(rows: &mut [Row], asked: &[Order], signed: &[bool], forms: &[ValueForm]) {
    rows.sort_unstable_by(|one, other| {
        let by_orders = asked.iter().map(|order| {
            let found = compare(one, other, order.by, signed, forms);
            match order.descending {
                true => found.reverse(),
                false => found,
            }
        });
        let decided = by_orders.fold(Ordering::Equal, Ordering::then);
        let keys = 0..one.keys.len();
        keys.fold(decided, |decided, key| {
            decided.then_with(|| compare(one, other, By::Key(key), signed, forms))
        })
    });
}

fn compare(one: &Row, other: &Row, by: By, signed: &[bool], forms: &[ValueForm]) -> Ordering {
    match by {
        By::Hits => one.hits.cmp(&other.hits),
        By::Key(at) => match (one.keys.get(at), other.keys.get(at)) {
            (Some(KeyValue::Number(one)), Some(KeyValue::Number(other)))
                if signed.get(at).is_some_and(|signed| *signed) =>
            {
                one.cast_signed().cmp(&other.cast_signed())
            }
            (one, other) => one.cmp(&other),
        },
        By::Value(at) => {
            let number = |row: &Row| {
                let form = forms.get(at).copied()?;
                Some(row.sums.get(at)?.in_form(form))
            };
            number(one).cmp(&number(other))
        }
    }
}
