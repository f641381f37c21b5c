//! Output of what arrives from a running machine: events, histograms and the console. It does not know why a
//! command follows a machine, or when the command stops.

pub(crate) mod console;
mod flame;
pub(crate) mod histograms;
pub(crate) mod optional_future;
pub(crate) mod printer;
pub(crate) mod symbolize;
