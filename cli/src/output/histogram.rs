//! Histograms as text and as JSON.
//!
//! Entries look as in the kernel's `hist` files (Documentation/trace/histogram.rst), but for numbers whose
//! type says more: these are shown by their type.
//!
//! Invariant: nothing of what a guest's keys are can steer a terminal.

use std::fmt::Write as _;

use hvprobe_proto::v1::{
    HistogramEntry, HistogramField, HistogramForm, HistogramKey, HistogramKeyValue,
    HistogramSchema, HistogramSum, HistogramTotals, histogram_key_value::What,
};
use serde::Serialize;

use super::bars;
use super::harmless;
use super::histogram_key::{shown, typed};
use super::maps;
use super::names::Names;
use super::stack_trace::StackTrace;
use super::value_json::Json;
use super::values::text as text_value;

/// How histograms are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// An entry a line.
    Entries,
    /// An entry a line, with a bar.
    Bars,
    /// An entry a line, as JSON.
    Json,
    /// A stack a line, as `flamegraph.pl` reads it.
    Folded,
}

/// What was counted, as it is shown; of `event` alone, if that is one.
pub(crate) fn text(
    look: Look,
    event: Option<&str>,
    schema: &HistogramSchema,
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
            let trigger = harmless(schema.histogram.as_bytes());
            writeln!(text, "# event histogram\n#\n# trigger info: {trigger}\n#\n")?;
            for entry in entries {
                writeln!(text, "{}", line(schema, entry, names))?;
            }
        }
        Look::Bars => {
            writeln!(text, "# {}\n", harmless(schema.histogram.as_bytes()))?;
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
        // Is told as soon as it is read.
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

/// Each entry with its keys, of which a stack has its functions, and its hits.
fn folded(schema: &HistogramSchema, entries: &[HistogramEntry], names: &Names) -> String {
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

fn line(schema: &HistogramSchema, entry: &HistogramEntry, names: &Names) -> String {
    let keys = schema.keys.iter().zip(&entry.keys);
    let keys: Vec<_> = keys
        .map(|(key, value)| {
            let name = harmless(key.name.as_bytes());
            format!("{name}: {}", padded(key, value, &entry.comm, names))
        })
        .collect();
    let mut line = format!("{{ {} }} hitcount: {:>10}", keys.join(", "), entry.hits);
    for (field, sum) in schema.values.iter().zip(&entry.values) {
        let told = match field.form() {
            HistogramForm::Hex => format!("{:x}", sum.sum),
            _ => signed(field, told(field, sum)),
        };
        let name = harmless(field.name.as_bytes());
        line.push_str(&format!("  {name}{}: {told:>10}", suffix(field)));
        if sum.count < entry.hits {
            line.push_str(&format!(" (unread: {})", entry.hits - sum.count));
        }
    }
    line
}

/// What is told of a field, beside its name, where that is not the sum.
fn suffix(field: &HistogramField) -> &'static str {
    match field.form() {
        HistogramForm::Average => ".avg",
        HistogramForm::Least => ".min",
        HistogramForm::Greatest => ".max",
        _ => "",
    }
}

fn told(field: &HistogramField, sum: &HistogramSum) -> u64 {
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

/// A part of a key as wide as the kernel has it.
fn padded(key: &HistogramKey, value: &HistogramKeyValue, comm: &[u8], names: &Names) -> String {
    let shown = shown(key, value, comm, names);
    match (&value.what, key.form()) {
        (Some(What::StackTrace(stack)), _) => {
            // As the kernel: the stack begins on a line of its own.
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

/// `[ADDRESS] NAME` with a name so wide.
fn behind_address(shown: &str, width: usize) -> String {
    let (address, name) = shown.split_once(' ').unwrap_or((shown, ""));
    format!("{address} {name:<width$}")
}

/// A line of JSON.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Line {
    /// Hits that agree in all keys.
    Entry {
        event: Option<String>,
        histogram: String,
        keys: Json,
        comm: String,
        hits: u64,
        values: Json,
    },
    /// What all entries are.
    Totals {
        event: Option<String>,
        histogram: String,
        hits: u64,
        entries: u64,
        dropped: u64,
        lost: u64,
        /// Hits that had happened are not counted yet.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        incomplete: bool,
    },
}

fn json(
    event: Option<&str>,
    schema: &HistogramSchema,
    entries: &[HistogramEntry],
    totals: &HistogramTotals,
    names: &Names,
) -> anyhow::Result<String> {
    let mut text = String::new();
    let event = event.map(|event| harmless(event.as_bytes()));
    let histogram = harmless(schema.histogram.as_bytes());
    for entry in entries {
        let keys = schema.keys.iter().zip(&entry.keys);
        let keys = keys.map(|(key, value)| {
            let name = harmless(key.name.as_bytes());
            (name, json_key(key, value, names))
        });
        let values = schema.values.iter().zip(&entry.values);
        let values = values.map(|(field, sum)| {
            let name = format!("{}{}", harmless(field.name.as_bytes()), suffix(field));
            let number = told(field, sum);
            let number = match field.signed {
                true => Json::Signed(number.cast_signed()),
                false => Json::Unsigned(number),
            };
            (name, number)
        });
        let line = Line::Entry {
            event: event.clone(),
            histogram: histogram.clone(),
            keys: Json::Object(keys.collect()),
            comm: harmless(&entry.comm),
            hits: entry.hits,
            values: Json::Object(values.collect()),
        };
        writeln!(text, "{}", serde_json::to_string(&line)?)?;
    }
    let line = Line::Totals {
        event,
        histogram,
        hits: totals.hits,
        entries: totals.entries,
        dropped: totals.dropped,
        lost: totals.lost,
        incomplete: totals.incomplete,
    };
    writeln!(text, "{}", serde_json::to_string(&line)?)?;
    Ok(text)
}

fn json_key(key: &HistogramKey, value: &HistogramKeyValue, names: &Names) -> Json {
    match (&value.what, key.form()) {
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
