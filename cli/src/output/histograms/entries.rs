//! Histograms as text and as JSON.
//!
//! Entries have the format of the kernel's `hist` files (Documentation/trace/histogram.rst), except that a number
//! of a known type, such as an enumeration, is shown as a value of that type.
//!
//! Invariant: no text from a guest's keys reaches a terminal with control characters in it.

use std::fmt::Write as _;

use hvprobe_proto::v1::{
    HistogramEntry, HistogramField, HistogramForm, HistogramKeyValue, HistogramSum,
    HistogramTotals, histogram_key_value::What,
};
use serde::Serialize;

use super::key::{shown, typed};
use super::schema::{Key, Schema};
use super::{bars, maps};
use crate::output::printable::harmless;
use crate::output::values::decode::text as text_value;
use crate::output::values::names::Names;
use crate::output::values::stack_trace::StackTrace;
use crate::output::values::value_json::Json;

/// Format of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// One line per entry.
    Entries,
    /// One line per entry, with a bar.
    Bars,
    /// One line of JSON per entry.
    Json,
    /// One line per stack, in the format of `flamegraph.pl`.
    Folded,
}

/// Formats a histogram. `event` is the counted event, if the histogram counts only one.
pub(crate) fn text(
    look: Look,
    event: Option<&str>,
    schema: &Schema,
    entries: &[HistogramEntry],
    totals: &HistogramTotals,
    names: &Names,
) -> anyhow::Result<String> {
    let mut text = String::new();
    if let (Some(event), Look::Entries | Look::Bars) = (event, look) {
        writeln!(text, "# events/{}/hist", harmless(event.as_bytes()))?;
    }
    match look {
        Look::Json => return json(event, schema, entries, totals, names),
        Look::Folded => return Ok(folded(schema, entries, names)),
        Look::Entries => {
            let trigger = &schema.histogram;
            writeln!(text, "# event histogram\n#\n# trigger info: {trigger}\n#\n")?;
            for entry in entries {
                writeln!(text, "{}", line(schema, entry, names))?;
            }
        }
        Look::Bars => {
            writeln!(text, "# {}\n", schema.histogram)?;
            text.push_str(&match maps::has_stacks(entries) {
                true => maps::text(schema, entries, names),
                false => bars::text(schema, entries, names),
            });
        }
    }
    let HistogramTotals {
        hits,
        entries,
        dropped,
        lost,
        // The reader of the counts has already reported it.
        incomplete: _,
    } = totals;
    writeln!(
        text,
        "\nTotals:\n    Hits: {hits}\n    Entries: {entries}\n    Dropped: {dropped}"
    )?;
    if *lost > 0 {
        writeln!(text, "    Lost by the machine, of any probe: {lost}")?;
    }
    Ok(text)
}

/// Returns one line per entry: its keys, with the functions of stacks, and its hits.
fn folded(schema: &Schema, entries: &[HistogramEntry], names: &Names) -> String {
    let mut text = String::new();
    for entry in entries {
        let keys = schema.keys.iter().zip(&entry.keys);
        let keys = keys.map(|(key, value)| match &value.what {
            Some(What::StackTrace(stack)) => StackTrace::from(stack).folded(names),
            _ => shown(key, value, &entry.comm, names).replace([';', ' '], "_"),
        });
        let keys: Vec<_> = keys.collect();
        text.push_str(&format!("{} {}\n", keys.join(";"), entry.hits));
    }
    text
}

fn line(schema: &Schema, entry: &HistogramEntry, names: &Names) -> String {
    let keys = schema.keys.iter().zip(&entry.keys);
    let keys: Vec<_> = keys
        .map(|(key, value)| {
            let value = padded(key, value, &entry.comm, names);
            format!("{}: {value}", key.name)
        })
        .collect();
    let mut line = format!("{{ {} }} hitcount: {:>10}", keys.join(", "), entry.hits);
    for (field, sum) in schema.values.iter().zip(&entry.values) {
        let number = match field.form() {
            HistogramForm::Hex => format!("{:x}", sum.sum),
            _ => signed(field, number_of(field, sum)),
        };
        let (name, suffix) = (&field.name, suffix(field));
        line.push_str(&format!("  {name}{suffix}: {number:>10}"));
        if sum.count < entry.hits {
            line.push_str(&format!(" (unread: {})", entry.hits - sum.count));
        }
    }
    line
}

/// Returns the suffix for a field's name that says which number is shown; empty for the sum.
fn suffix(field: &HistogramField) -> &'static str {
    match field.form() {
        HistogramForm::Average => ".avg",
        HistogramForm::Least => ".min",
        HistogramForm::Greatest => ".max",
        _ => "",
    }
}

fn number_of(field: &HistogramField, sum: &HistogramSum) -> u64 {
    match field.form() {
        HistogramForm::Average => sum.average,
        HistogramForm::Least => sum.least,
        HistogramForm::Greatest => sum.greatest,
        _ => sum.sum,
    }
}

fn signed(field: &HistogramField, number: u64) -> String {
    match field.signed {
        true => number.cast_signed().to_string(),
        false => number.to_string(),
    }
}

/// Formats a part of a key, padded to the width that the kernel uses.
fn padded(key: &Key, value: &HistogramKeyValue, comm: &[u8], names: &Names) -> String {
    let shown = shown(key, value, comm, names);
    match (&value.what, key.form) {
        (Some(What::StackTrace(stack)), _) => {
            // As in the kernel, the stack begins on a new line.
            format!(
                "{}\n",
                StackTrace::from(stack).indented("\n         ", names)
            )
        }
        (Some(What::Text(_)), _) => format!("{shown:<50}"),
        (None, _) => format!("{shown:>10}"),
        (_, HistogramForm::Symbol) => behind_address(&shown, 45),
        (_, HistogramForm::SymbolOffset) => behind_address(&shown, 55),
        (_, HistogramForm::Hex | HistogramForm::Execname | HistogramForm::Buckets) => shown,
        (_, HistogramForm::Log2) => format!("{shown:<6}"),
        _ => format!("{shown:>10}"),
    }
}

/// Pads the name in `[ADDRESS] NAME` to `width`.
fn behind_address(shown: &str, width: usize) -> String {
    let (address, name) = shown.split_once(' ').unwrap_or((shown, ""));
    format!("{address} {name:<width$}")
}

/// Line of JSON output.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Line {
    /// Hits with the same keys.
    Entry {
        event: Option<String>,
        histogram: String,
        keys: Json,
        comm: String,
        hits: u64,
        values: Json,
    },
    /// Totals of all entries.
    Totals {
        event: Option<String>,
        histogram: String,
        hits: u64,
        entries: u64,
        dropped: u64,
        lost: u64,
        /// Whether some earlier hits are not counted yet.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        incomplete: bool,
    },
}

fn json(
    event: Option<&str>,
    schema: &Schema,
    entries: &[HistogramEntry],
    totals: &HistogramTotals,
    names: &Names,
) -> anyhow::Result<String> {
    let mut text = String::new();
    let event = event.map(|event| harmless(event.as_bytes()));
    for entry in entries {
        let keys = schema.keys.iter().zip(&entry.keys);
        let keys = keys.map(|(key, value)| {
            let name = key.name.clone();
            (name, json_key(key, value, names))
        });
        let values = schema.values.iter().zip(&entry.values);
        let values = values.map(|(field, sum)| {
            let name = format!("{}{}", field.name, suffix(field));
            let number = number_of(field, sum);
            let number = match field.signed {
                true => Json::Signed(number.cast_signed()),
                false => Json::Unsigned(number),
            };
            (name, number)
        });
        let line = Line::Entry {
            event: event.clone(),
            histogram: schema.histogram.clone(),
            keys: Json::Object(keys.collect()),
            comm: harmless(&entry.comm),
            hits: entry.hits,
            values: Json::Object(values.collect()),
        };
        writeln!(text, "{}", serde_json::to_string(&line)?)?;
    }
    let line = Line::Totals {
        event,
        histogram: schema.histogram.clone(),
        hits: totals.hits,
        entries: totals.entries,
        dropped: totals.dropped,
        lost: totals.lost,
        incomplete: totals.incomplete,
    };
    writeln!(text, "{}", serde_json::to_string(&line)?)?;
    Ok(text)
}

fn json_key(key: &Key, value: &HistogramKeyValue, names: &Names) -> Json {
    match (&value.what, key.form) {
        (None, _) => Json::Null,
        (Some(What::StackTrace(stack)), _) => StackTrace::from(stack).json(names),
        (Some(What::Text(text)), _) => Json::of(&text_value(text, false), names),
        (Some(What::Number(number)), HistogramForm::Unspecified) => {
            Json::of(&typed(key, *number), names)
        }
        (Some(What::Number(number)), HistogramForm::Hex) => Json::Text(format!("{number:#x}")),
        (Some(What::Number(number)), form) => match form {
            HistogramForm::Symbol | HistogramForm::SymbolOffset => Json::Text(names.of(*number)),
            _ => Json::Unsigned(*number),
        },
    }
}

#[cfg(test)]
mod tests;
