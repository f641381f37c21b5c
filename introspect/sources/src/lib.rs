//! Answers questions from the files of a kernel or a module: its source lines and variables, the definitions for a
//! probe in the syntax of `perf probe`, and what a definition resolves to or why it is refused.
//!
//! Invariant: nothing here needs a machine or a connection. A server uses this crate to answer its clients; a
//! client that has the files uses it directly.

mod explain;
mod indexes;
mod perf_probes;
mod refusal;
mod source_lines;
mod sources;

pub use explain::{ExplainError, Explanation, explain};
pub use hvprobe_engine::{Explained, Shown};
pub use hvprobe_linux::debug_info::SourceLine;
pub use indexes::Indexes;
pub use perf_probes::Definitions;
pub use refusal::{refused, remedy};
pub use source_lines::SourceLines;
pub use sources::{Sources, SourcesError};
