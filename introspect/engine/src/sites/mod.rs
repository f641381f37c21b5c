//! Probepoints and probes as the registry stores them, and the text at the probepoints.

pub(crate) mod probes;
pub(crate) mod site;
pub(crate) mod text;
