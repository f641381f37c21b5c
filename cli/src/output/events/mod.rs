//! Hits and other events as lines of text, and the parts of an event that are the same in lines and in JSON. It
//! does not know where events come from.

pub(crate) mod arguments;
pub(crate) mod asked;
pub(crate) mod captured;
mod hits;
pub(crate) mod lines;
pub(super) mod registers;
pub(crate) mod times;
mod valued;

pub(crate) use hits::is_hit;
pub(crate) use lines::{Label, Labels, dropped, duration, exception, line, throttled};
