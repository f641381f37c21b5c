//! Conversion between messages and the values of [`hvprobe_spec`], for both ends.
//!
//! Invariant: conversions refuse missing required fields and meaningless numbers, with an error that names the
//! field. Exception: types of values are converted as far as possible, so that the rest can be shown.

mod actions;
mod arguments;
mod budget;
mod enums;
mod fetched;
mod meaningless;
pub mod probe_spec;
mod registers;
mod shapes;
mod value;

pub use enums::WireEnum;
pub use meaningless::Meaningless;
pub use registers::register;
pub use value::Wire;
