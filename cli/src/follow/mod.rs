//! What arrives from a machine while it runs, as it is printed: events, histograms and the console. It does not
//! know why a command follows a machine, or when it stops.

pub(crate) mod console;
mod flame;
pub(crate) mod histograms;
pub(crate) mod optional_future;
pub(crate) mod printer;
pub(crate) mod symbolize;
