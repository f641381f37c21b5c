//! Conversion between messages and the values of [`hvprobe_spec`], for both ends.
//!
//! Invariant: a message that means nothing is refused by name; nothing is guessed.

pub mod actions;
pub mod arguments;
pub mod budget;
mod enums;
mod fetched;
mod meaningless;
pub mod probe_spec;
pub mod registers;

pub use enums::WireEnum;
pub use meaningless::Meaningless;
