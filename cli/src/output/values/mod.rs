//! Values of a guest as text and as JSON: decoded by their types, with names and source lines for addresses. It
//! does not know which event a value is from, and asks no server for a name.

mod bits;
pub(crate) mod decode;
pub(crate) mod names;
pub(super) mod quoted;
pub(crate) mod source_lines;
pub(crate) mod stack_trace;
pub(super) mod value_json;
pub(super) mod value_text;

pub(crate) use decode::Value;
