//! Conversion between messages and the values of [`hvprobe_spec`], for both ends.
//!
//! Invariant: a message that means nothing is refused by name; nothing is guessed.

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
