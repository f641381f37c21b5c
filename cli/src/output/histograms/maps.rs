//! Formatting of histograms with stacks as keys, as bpftrace formats maps.

use std::fmt::Write as _;

use hvprobe_proto::v1::{HistogramEntry, histogram_key_value::What};

use super::key::shown;
use super::schema::Schema;
use crate::output::values::names::Names;
use crate::output::values::stack_trace::StackTrace;

/// Returns whether the keys of `entries` contain stacks.
pub(super) fn has_stacks(entries: &[HistogramEntry]) -> bool {
    let mut keys = entries.iter().flat_map(|entry| &entry.keys);
    keys.any(|key| matches!(key.what, Some(What::StackTrace(_))))
}

/// Formats `entries`, each with all its keys. The addresses of a stack are on lines of their own.
pub(super) fn text(schema: &Schema, entries: &[HistogramEntry], names: &Names) -> String {
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
