//! Captured items that are the values of arguments. They are shown as arguments, and not again as captures.

use hvprobe_proto::v1::{self, argument};

/// Returns the positions of these items among the captured items of `probe`.
pub(crate) fn items(probe: &v1::Probe) -> impl Iterator<Item = usize> {
    let sources = probe.arguments.iter().map(|each| &each.source);
    sources.filter_map(|source| match source {
        Some(argument::Source::Item(at)) => usize::try_from(*at).ok(),
        _ => None,
    })
}
