//! Histograms on the wire.

use hvprobe_hit::aggregate::{KeyValue, Row, Snapshot, Sum};
use hvprobe_proto::v1::{self, HistogramForm, histogram_key_value};
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::aggregate::{Aggregate, Measured, Part};
use hvprobe_spec::histogram::{Histogram, Key, KeyForm, ValueForm};

/// Maximum number of entries in one message; each has some KiB at most.
const ENTRIES: usize = 1024;
/// Maximum bytes of the entries in one message, unless a single entry is longer.
const BYTES: usize = 1 << 20;

/// Describes `histogram`. The types of its fields are in `what`, once they are known.
pub(crate) fn schema(histogram: &Histogram, what: Option<&Aggregate>) -> v1::HistogramSchema {
    let keys = histogram.keys.iter().enumerate();
    let values = histogram.values.iter().enumerate();
    let part = |n| what.and_then(|what| what.keys.get(n));
    let measured = |n| what.and_then(|what| what.values.get(n));
    v1::HistogramSchema {
        histogram: histogram.to_string(),
        keys: keys.map(|(n, it)| key(it, part(n))).collect(),
        values: values
            .map(|(n, value)| v1::HistogramField {
                name: value.name(),
                form: of_value(value.form).into(),
                signed: measured(n).is_some_and(Measured::is_signed),
            })
            .collect(),
    }
}

fn key(key: &Key, part: Option<&Part>) -> v1::HistogramKey {
    let is_stack = match part {
        Some(part) => matches!(part.of, Measured::StackTrace(_)),
        None => key.is_stack_trace(),
    };
    let (form, width) = match key.form {
        KeyForm::Plain if is_stack => (HistogramForm::Stacktrace, 0),
        KeyForm::Plain => (HistogramForm::Unspecified, 0),
        KeyForm::Hex => (HistogramForm::Hex, 0),
        KeyForm::Symbol => (HistogramForm::Symbol, 0),
        KeyForm::SymbolOffset => (HistogramForm::SymbolOffset, 0),
        KeyForm::ExecName => (HistogramForm::Execname, 0),
        KeyForm::Log2 => (HistogramForm::Log2, 0),
        KeyForm::Bits => (HistogramForm::Bits, 0),
        KeyForm::Buckets(width) => (HistogramForm::Buckets, width),
        KeyForm::Usecs => (HistogramForm::Usecs, 0),
    };
    v1::HistogramKey {
        name: key.name(),
        form: form.into(),
        width,
        r#type: part.filter(|_| !is_stack).map(|part| part.shape.to_wire()),
    }
}

fn of_value(form: ValueForm) -> HistogramForm {
    match form {
        ValueForm::Sum => HistogramForm::Unspecified,
        ValueForm::Hex => HistogramForm::Hex,
        ValueForm::Average => HistogramForm::Average,
        ValueForm::Least => HistogramForm::Least,
        ValueForm::Greatest => HistogramForm::Greatest,
    }
}

/// Converts `snapshot` to one or more messages. `is_whole` says whether all hits until now are counted.
pub(crate) fn parts(snapshot: Snapshot, is_whole: bool) -> Vec<v1::HistogramPart> {
    let totals = v1::HistogramTotals {
        hits: snapshot.hits,
        entries: snapshot.rows.len() as u64,
        dropped: snapshot.dropped,
        lost: snapshot.lost,
        incomplete: !is_whole,
    };
    let mut parts = vec![v1::HistogramPart::default()];
    let mut bytes = 0;
    for row in snapshot.rows {
        let entry = entry(row);
        bytes += prost::Message::encoded_len(&entry);
        let is_full = |part: &v1::HistogramPart| part.entries.len() == ENTRIES || bytes > BYTES;
        if parts.last().is_none_or(is_full) {
            parts.push(v1::HistogramPart::default());
            bytes = prost::Message::encoded_len(&entry);
        }
        if let Some(part) = parts.last_mut() {
            part.entries.push(entry);
        }
    }
    if let Some(part) = parts.last_mut() {
        part.totals = Some(totals);
    }
    parts
}

fn entry(row: Row) -> v1::HistogramEntry {
    let comm = row.comm.unwrap_or_default();
    let end = comm.iter().position(|byte| *byte == 0);
    v1::HistogramEntry {
        keys: row.keys.into_iter().map(key_value).collect(),
        hits: row.hits,
        values: row.sums.iter().map(sum).collect(),
        comm: comm[..end.unwrap_or(comm.len())].to_vec(),
    }
}

fn key_value(value: KeyValue) -> v1::HistogramKeyValue {
    v1::HistogramKeyValue {
        what: match value {
            KeyValue::Unreadable => None,
            KeyValue::Number(number) => Some(histogram_key_value::What::Number(number)),
            KeyValue::Text(text) => Some(histogram_key_value::What::Text(text.into())),
            KeyValue::StackTrace(addresses) => {
                let addresses = addresses.iter().map(|at| at.0).collect();
                let trace = v1::StackTrace { addresses };
                Some(histogram_key_value::What::StackTrace(trace))
            }
        },
    }
}

fn sum(sum: &Sum) -> v1::HistogramSum {
    let value = |form| low(sum.in_form(form));
    v1::HistogramSum {
        count: sum.count,
        sum: value(ValueForm::Sum),
        least: value(ValueForm::Least),
        greatest: value(ValueForm::Greatest),
        average: value(ValueForm::Average),
        // Fits: it is a sum of 64-bit numbers, and there are fewer than 2^63 of them.
        sum_high: i64::try_from(sum.sum >> 64).ok(),
    }
}

/// Returns the lowest 64 bits.
fn low(number: i128) -> u64 {
    let bytes = number.to_le_bytes();
    let low = bytes.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: usize) -> Row {
        Row {
            keys: vec![
                KeyValue::Text(vec![b'a'; text].into()),
                KeyValue::Number(7),
                KeyValue::Unreadable,
            ],
            hits: 3,
            sums: vec![Sum {
                count: 2,
                sum: -5,
                least: -9,
                greatest: 4,
            }],
            comm: Some(*b"cat\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        }
    }

    fn snapshot(rows: Vec<Row>) -> Snapshot {
        Snapshot {
            rows,
            hits: 9,
            dropped: 1,
            lost: 2,
        }
    }

    #[test]
    fn entries_say_all_that_was_counted() {
        let parts = parts(snapshot(vec![row(1)]), false);
        let [part] = parts.as_slice() else {
            panic!("{parts:?}");
        };
        let [entry] = part.entries.as_slice() else {
            panic!("{part:?}");
        };
        let keys: Vec<_> = entry.keys.iter().map(|key| key.what.clone()).collect();
        let text = histogram_key_value::What::Text(b"a".to_vec());
        let number = histogram_key_value::What::Number(7);
        assert_eq!(keys, [Some(text), Some(number), None]);
        assert_eq!((entry.hits, entry.comm.as_slice()), (3, &b"cat"[..]));
        let sum = entry.values[0];
        let signed = [sum.sum, sum.least, sum.greatest, sum.average].map(u64::cast_signed);
        assert_eq!((sum.count, signed), (2, [-5, -9, 4, -2]));
        let totals = part.totals.unwrap();
        assert_eq!(
            (totals.hits, totals.entries, totals.dropped, totals.lost),
            (9, 1, 1, 2)
        );
        assert!(totals.incomplete);
    }

    #[test]
    fn messages_stay_small_and_the_last_one_has_the_totals() {
        for (rows, text, messages) in [(0, 0, 1), (1024, 1, 1), (1025, 1, 2), (900, 2000, 2)] {
            let parts = parts(snapshot(vec![row(text); rows]), true);
            assert_eq!(parts.len(), messages, "{rows} of {text}");
            let counted: usize = parts.iter().map(|part| part.entries.len()).sum();
            assert_eq!(counted, rows);
            let has_totals: Vec<_> = parts.iter().map(|part| part.totals.is_some()).collect();
            assert_eq!(has_totals.iter().position(|has| *has), Some(messages - 1));
        }
    }
}
