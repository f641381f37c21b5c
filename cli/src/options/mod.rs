//! The command line: what can be typed, the help that explains it, and the checks that need only what was typed. It
//! talks to no server and does no command's work.

pub(crate) mod command_line;
pub(crate) mod events;
pub(crate) mod explain;
pub(crate) mod guest;
pub(crate) mod histograms;
pub(crate) mod label;
pub(crate) mod log;
mod one_of;
pub(crate) mod probes;
pub(crate) mod server;
pub(crate) mod size;
pub(crate) mod sources;
pub(crate) mod vm;
