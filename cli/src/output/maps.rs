//! Histograms by stack, as bpftrace prints its maps.

use std::fmt::Write as _;

use hvprobe_proto::v1::{HistogramEntry, HistogramSchema, histogram_key_value::What};

use super::histogram_key::shown;
use super::names::Names;
use super::stack_trace::StackTrace;

/// Whether `entries` are told apart by stacks.
pub(super) fn has_stacks(entries: &[HistogramEntry]) -> bool {
    let mut keys = entries.iter().flat_map(|entry| &entry.keys);
    keys.any(|key| matches!(key.what, Some(What::StackTrace(_))))
}

/// `entries`, each with all of its keys: a stack with an address a line.
pub(super) fn text(schema: &HistogramSchema, entries: &[HistogramEntry], names: &Names) -> String {
    let mut text = String::new();
    for entry in entries {
        let keys = schema.keys.iter().zip(&entry.keys);
        let keys = keys.map(|(key, value)| match &value.what {
            Some(What::StackTrace(stack)) => {
                format!("{}\n", StackTrace::from(stack).indented("\n    ", names))
            }
            _ => shown(key, value, &entry.comm, names),
        });
        let keys: Vec<_> = keys.collect();
        writeln!(text, "@[{}]: {}", keys.join(", "), entry.hits)
            .expect("writing to a string cannot fail");
    }
    text
}
