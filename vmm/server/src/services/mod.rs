//! The services of `hvprobe.v1`: they validate, convert and pass on requests.

pub(crate) mod decisions;
pub(crate) mod events;
pub(crate) mod feed;
pub(crate) mod histograms;
pub(crate) mod host;
pub(crate) mod machines;
pub(crate) mod probes;
pub(crate) mod sessions;
pub(crate) mod sources;
pub(crate) mod symbols;
pub(crate) mod wanted;
mod watcher;
