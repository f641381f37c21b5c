//! The debug information of a kernel (DWARF): source lines, their addresses in the text, and where variables
//! are at those addresses.
//!
//! Invariants: nothing in the file is trusted. Every read is checked, references are followed for a bounded number
//! of steps, and nothing recurses deeper than a constant. Damaged data gives an error that says where the damage
//! is, never a panic or unbounded work. A file answers questions only about the kernel that it was made with: the
//! build ids are compared before the first question.

mod addresses;
mod budget;
mod error;
mod file;
mod index;
mod indexing;
mod info;
mod later;
mod lines;
mod location;
mod members;
mod module;
mod points;
mod rows;
mod scopes;
mod shown;
#[cfg(test)]
mod tests;
mod typename;
mod variables;

pub use addresses::SourceLine;
pub use error::DebugError;
pub use file::DebugFile;
pub use index::Index;
pub use info::DebugInfo;
pub use lines::{FunctionLines, Line};
pub use location::{Fetch, Location};
pub use members::Selected;
pub use module::{ModuleFile, is_module_name};
pub use points::PointPlace;
pub use shown::Shown;
pub use variables::Variable;
