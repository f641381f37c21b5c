//! The terminal that the program runs on: raw mode, Ctrl-C, progress and the log. It knows no server.

pub(crate) mod log;
pub(crate) mod progress;
pub(crate) mod raw;
pub(crate) mod signals;
