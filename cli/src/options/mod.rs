//! The command line: its options and their help, and the checks that need only the options. It talks to no server
//! and runs no command.

pub(crate) mod command_line;
pub(crate) mod events;
pub(crate) mod explain;
pub(crate) mod guest;
pub(crate) mod histograms;
pub(crate) mod image;
pub(crate) mod label;
pub(crate) mod log;
mod one_of;
pub(crate) mod probes;
pub(crate) mod server;
pub(crate) mod size;
pub(crate) mod sources;
pub(crate) mod vm;
