//! Memory of guests.

mod ram;
mod slot;
mod written;

pub use ram::{GuestRam, HOLE_END, HOLE_START};
pub use slot::{MIN_RAM, MemoryError};
