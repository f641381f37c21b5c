//! Answers from the files of a kernel or a module: source lines and variables, definitions from the syntax of
//! `perf probe`, and what a definition resolves to.
//!
//! Nothing here needs a machine or a connection.

pub(crate) mod explain;
pub(crate) mod indexes;
pub(crate) mod perf_probes;
pub(crate) mod source_lines;
pub(crate) mod sources;
pub(crate) mod uploads;
