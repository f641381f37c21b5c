//! Results, events and messages as text and as JSON. Everything here formats what it is given and writes it to a
//! stream or a file; it knows no server, no command and no option.

pub(crate) mod events;
pub(crate) mod explained;
pub(crate) mod file;
pub(crate) mod histograms;
pub(crate) mod image;
pub(crate) mod json;
mod printable;
pub(crate) mod remedy;
pub(crate) mod size;
pub(crate) mod skipped;
mod streams;
pub(crate) mod summary;
pub(crate) mod table;
pub(crate) mod values;
pub(crate) mod waiting;
pub(crate) mod words;

pub(crate) use printable::harmless;
pub(crate) use streams::{eprint, error, message_line, notice, print, speak_json};
