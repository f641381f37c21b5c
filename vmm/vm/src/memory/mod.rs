//! Guest memory.

mod ram;
mod slot;
mod touched;
mod written;

pub use ram::GuestRam;
pub(crate) use ram::HOLE_END;
pub use slot::{MIN_RAM, MemoryError};
