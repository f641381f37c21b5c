//! From a definition to a probepoint that may be planted.

pub(crate) mod arguments;
pub(crate) mod kernel;
pub(crate) mod probepoint;
pub(crate) mod span;
pub(crate) mod text;
