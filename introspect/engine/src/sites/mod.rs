//! Probepoints as the registry keeps them, and the text there.

pub(crate) mod probes;
pub(crate) mod site;
pub(crate) mod text;
