//! Plans a definition: finds and checks its probepoint and arguments.

pub(crate) mod arguments;
pub(crate) mod kernel;
pub(crate) mod probepoint;
pub(crate) mod span;
pub(crate) mod text;
